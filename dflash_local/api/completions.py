"""``POST /v1/completions``: text or ids to go on with, no chat template; all text in one, whatever its channel."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from msgspec import Meta

from dflash_local.api.constraint_fields import ResponseFormat, format_schema
from dflash_local.api.openai_reply import OpenAIReply, finite
from dflash_local.api.refusals import FieldError
from dflash_local.api.request_body import (
    QUESTION,
    GenerationBody,
    ParsedRequest,
    Refused,
    parsed_request,
    read_generation,
)
from dflash_local.events import Step, TokenLogprob
from dflash_local.request import MAX_TOP_LOGPROBS
from dflash_local.schema import quoted
from dflash_local.service.backend import Model

MAX_NEW_TOKENS = 16  # OpenAI's default here, and vLLM's
MAX_ID = 2**31
TEXT = {"type": "string", "minLength": 1}
IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_ID}}
NOT_HERE: Refused = {
    "echo": ("the reply alone is sent", (False,)),
    "suffix": ("leave it out", ("",)),
}


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """The body of a text completion. ``prompt`` is checked as a whole: a list holds texts, ids or lists of ids."""

    prompt: Annotated[Any, Meta(examples=[QUESTION], extra_json_schema={"anyOf": [TEXT, IDS]})]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None


def read(body: bytes, find: Callable[[str], Model]) -> ParsedRequest:
    """Return the request of a body.

    Args:
        find: the model of that name; raises UnknownModelError.

    Raises:
        FieldError: a field is wrong or not supported. UnknownModelError: another model.
    """
    record, sent = read_generation(CompletionBody, body, NOT_HERE)
    own = {**_prompt(record.prompt), "logprobs": record.logprobs}
    return parsed_request(
        record, sent, find(record.model), MAX_NEW_TOKENS, schema=format_schema(record.response_format), **own
    )


def _prompt(value: Any) -> dict[str, Any]:
    """Return one prompt as a field of ``Request``: text, a list that holds one text, or token ids."""
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


class CompletionReply(OpenAIReply):
    """A text completion."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    nothing = {"text": ""}
    prompt_ids_in_choice = True

    def __init__(self, parsed: ParsedRequest, model: Model, fingerprint: Callable[[], str]) -> None:
        super().__init__(parsed, model, fingerprint)
        self._texts: list[str] = []
        self._begin_offsets()

    def _said(self, event: Step) -> Iterator[dict[str, Any]]:
        text = "".join(piece.text for piece in event.pieces)
        if text:
            self._texts.append(text)
            yield self._chunk({"text": text})

    def _begin_offsets(self) -> None:
        self._offset = 0  # of the next token in the text of all tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def _whole(self) -> dict[str, Any]:
        self._begin_offsets()
        return {"text": "".join(self._texts)}

    def _as_logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """Return OpenAI's older form: one list for each fact of the tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            data = token.text.encode() if token.bytes is None else bytes(token.bytes)
            self._offset += len(self._characters.decode(data))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogprob) -> dict[str, float]:
    """Return the sampled token and the likeliest ones; of two that show the same text, the sampled one."""
    chosen = {token.text: finite(token.logprob)}
    return chosen | {text: finite(value) for _, text, value, _ in token.top} | chosen
