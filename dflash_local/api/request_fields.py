"""The fields that chat and completion bodies share: sampling, limits, streaming, and what is not supported.

A field that is absent or null takes the model's own default (``generation_config.json``), as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from dflash_local.api.fields import Fields, parse, quoted
from dflash_local.api.log import LOGGER
from dflash_local.api.refusals import FieldError
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.request import (
    MAX_BLOCK_SIZE,
    MAX_NEW_TOKENS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MIN_SEED,
    Limits,
    Request,
    SamplingParams,
)
from dflash_local.service.resident import Model

# Fields that are taken although they change no text: field -> why, as the log has it.
TAKEN = {
    "user": "not kept",
    "metadata": "not kept",
    "store": "nothing is stored",
    "safety_identifier": "not kept",
    "prompt_cache_key": "the last prompts are cached anyway",
    "prompt_cache_retention": "the last prompts are cached anyway",
    "service_tier": "there is one tier",
    "parallel_tool_calls": "the model decides how many calls it makes",
    "prediction": "the drafter predicts",
}
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# field -> (why, values that ask for nothing): named by OpenAI or vLLM, not done here
REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "logit_bias": ("leave it out", ({},)),
    "best_of": ("one reply is made; leave it out", (1,)),
    "min_tokens": ("leave it out", (0,)),
    "ignore_eos": ("leave it out", (False,)),
    "skip_special_tokens": ("they are always skipped", (True,)),
    "guided_json": ("replies are not constrained", ()),
    "guided_regex": ("replies are not constrained", ()),
    "structured_outputs": ("replies are not constrained", ()),
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, read: the model as sent; with ``include_usage`` the figures come in a last chunk of a stream."""

    request: Request
    model: str
    stream: bool
    include_usage: bool


def read(
    body: bytes,
    find: Callable[[str], Model],
    own: Callable[[Fields, Model], dict[str, Any]],
    refused: Mapping[str, tuple[str, tuple[object, ...]]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> ParsedRequest:
    """The request of a body.

    Args:
        find: the model of that name; raises UnknownModelError.
        own: reads the endpoint's own fields, as fields of a ``Request``. refused: those that it does not support.

    Raises:
        FieldError: a field is wrong, unknown or not supported. UnknownModelError: another model.
    """
    fields = Fields(parse(body))
    name = fields.needed_text("model")
    model = find(name)
    given = own(fields, model)
    stream, include_usage = _streaming(fields)
    request = Request(
        sampling=_sampling(fields, model),
        limits=_limits(fields, max_new_tokens),
        **given,
        **_generation_options(fields, model),
    )
    count = fields.integer("n", 1)
    if count not in (None, 1):
        raise FieldError(
            "n", f"unsupported: n is {quoted(count)}, 1 at most", "send the request again", "unsupported_parameter"
        )
    for field, (why, harmless) in {**refused, **REFUSED}.items():
        fields.refuse(field, why, harmless)
    for field, why in TAKEN.items():
        fields.ignore(field, why)
    fields.finish()
    if fields.taken:
        LOGGER.info("taken without effect: %s", "; ".join(f"{field}: {why}" for field, why in fields.taken.items()))
    return ParsedRequest(request, name, stream, include_usage)


def _sampling(fields: Fields, model: Model) -> SamplingParams:
    """The model's own sampling with the body's fields in it."""
    given: dict[str, Any] = {name: fields.number(name) for name in NUMBERS}
    top_k = fields.integer("top_k", -1, 2**31)
    given["top_k"] = 0 if top_k == -1 else top_k  # vLLM writes "off" so
    given["seed"] = fields.integer("seed", MIN_SEED, MAX_SEED)
    try:
        return replace(model.sampling, **{name: value for name, value in given.items() if value is not None})
    except UsageError as error:
        raise FieldError(error.message.split(" ", 1)[0], error.message, error.hint) from error


def _limits(fields: Fields, default: int) -> Limits:
    """Where the reply ends; without a number where the context does."""
    counts = [fields.integer(name, 0, MAX_NEW_TOKENS) for name in ("max_tokens", "max_completion_tokens")]
    given = {count for count in counts if count is not None}
    if len(given) > 1:
        raise FieldError("max_tokens", "max_tokens and max_completion_tokens differ", "send one of them")
    stop = fields.take("stop")
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FieldError("stop", f"stop must be text or a list of texts, got {quoted(stop)}")
    if len(texts) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise FieldError("stop", f"stop holds 1..{MAX_STOPS} texts of 1..{MAX_STOP_CHARS} characters each")
    return Limits(given.pop() if given else default, tuple(texts))


def _generation_options(fields: Fields, model: Model) -> dict[str, Any]:
    """Our own fields, ``mode`` and ``block_size``, and vLLM's ``return_token_ids``, as fields of a ``Request``."""
    mode = fields.text("mode") or model.mode
    if mode not in ("dflash", "ar"):
        raise FieldError("mode", f"mode {quoted(mode)} is not known", "use dflash or ar")
    return {
        "mode": cast(Mode, mode),
        "block_size": fields.integer("block_size", 1, MAX_BLOCK_SIZE),
        "return_token_ids": bool(fields.flag("return_token_ids")),
    }


def _streaming(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether to add the figures in a last chunk."""
    stream = bool(fields.flag("stream"))
    value = fields.take("stream_options")
    if value is None:
        return stream, False
    if not stream:
        raise FieldError("stream_options", "stream_options without stream", "set stream to true")
    options = Fields(value, "stream_options")
    include_usage = bool(options.flag("include_usage"))
    options.ignore("include_obfuscation", "chunks are sent as they are")
    options.refuse("continuous_usage_stats", "figures come at the end", (False,))
    options.finish()
    fields.taken |= options.taken
    return stream, include_usage
