"""The body of ``POST /v1/completions`` to a ``Request``: text or ids to go on with, no chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_local.api import request_fields
from dflash_local.api.fields import Fields, parse, quoted
from dflash_local.api.refusals import FieldError
from dflash_local.request import MAX_TOP_LOGPROBS, Request
from dflash_local.service.resident import Model

MAX_NEW_TOKENS = 16  # OpenAI's default here, and vLLM's
MAX_ID = 2**31


def read(body: bytes, find: Callable[[str], Model]) -> request_fields.ParsedRequest:
    """The request of a body.

    Args:
        find: the model of that name; raises UnknownModelError.

    Raises:
        FieldError: a field is wrong, unknown or not supported. UnknownModelError: another model.
    """
    fields = Fields(parse(body))
    name = fields.needed_text("model")
    model = find(name)
    prompt = _prompt(fields.take("prompt"))
    stream, include_usage = request_fields.streaming(fields)
    request = Request(
        **prompt,
        sampling=request_fields.sampling(fields, model),
        limits=request_fields.limits(fields, MAX_NEW_TOKENS),
        logprobs=fields.integer("logprobs", 0, MAX_TOP_LOGPROBS),
        **request_fields.generation_options(fields, model),
    )
    fields.refuse("echo", "the reply alone is sent", (False,))
    fields.refuse("suffix", "leave it out", ("",))
    fields.refuse("response_format", "replies are not constrained", ({"type": "text"},))
    request_fields.refuse_rest(fields)
    return request_fields.ParsedRequest(request, name, stream, include_usage)


def _prompt(value: Any) -> dict[str, Any]:
    """One prompt: text, a list that holds one text, or token ids."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return {"prompt": value}
    if isinstance(value, list) and value:
        if any(isinstance(item, (str, list)) for item in value):
            raise FieldError("prompt", "unsupported: several prompts", "send one", "unsupported_parameter")
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_ID for item in value):
            return {"prompt_ids": tuple(value)}
    raise FieldError("prompt", f"prompt must be text or token ids, and not empty, got {quoted(value)}")
