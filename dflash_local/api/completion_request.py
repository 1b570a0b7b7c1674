"""The body of ``POST /v1/completions`` to a ``Request``: text or ids to go on with, no chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_local.api import request_fields
from dflash_local.api.fields import Fields, quoted
from dflash_local.api.refusals import FieldError
from dflash_local.request import MAX_TOP_LOGPROBS
from dflash_local.service.resident import Model

MAX_NEW_TOKENS = 16  # OpenAI's default here, and vLLM's
MAX_ID = 2**31


REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "echo": ("the reply alone is sent", (False,)),
    "suffix": ("leave it out", ("",)),
    "response_format": ("replies are not constrained", ({"type": "text"},)),
}


def read(body: bytes, find: Callable[[str], Model]) -> request_fields.ParsedRequest:
    """See ``request_fields.read``."""
    return request_fields.read(body, find, _own, REFUSED, MAX_NEW_TOKENS)


def _own(fields: Fields, _model: Model) -> dict[str, Any]:
    return {**_prompt(fields.take("prompt")), "logprobs": fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)}


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
