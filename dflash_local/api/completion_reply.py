"""Events to the chunks and the body of a text completion: all text in one, whatever its channel."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Any

from dflash_local.api.figures import finite
from dflash_local.api.reply import Reply
from dflash_local.api.request_fields import ParsedRequest
from dflash_local.events import Step, TokenLogprob


class CompletionReply(Reply):
    """A text completion."""

    kind = chunk_kind = "text_completion"
    nothing = {"text": ""}
    prompt_ids_in_choice = True

    def __init__(self, parsed: ParsedRequest, head: Callable[[], dict[str, Any]]) -> None:
        super().__init__(parsed, head)
        self._texts: list[str] = []
        self._begin_offsets()

    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
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
        """OpenAI's older form: one list for each fact of the tokens."""
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
    """The sampled token and the likeliest ones; of two that show the same text, the sampled one."""
    chosen = {token.text: finite(token.logprob)}
    return chosen | {text: finite(value) for _, text, value, _ in token.top} | chosen
