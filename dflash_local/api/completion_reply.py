"""Events to the chunks and the body of a text completion: all text in one, whatever its channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dflash_local.api.figures import Tally, finite
from dflash_local.api.request_fields import ParsedRequest
from dflash_local.api.token_ids import TokenIds
from dflash_local.events import Finished, Notice, Started, Step, TokenLogprob
from dflash_local.service.resident import Model


class CompletionReply:
    """One completion, for streaming or whole. See ``ChatReply``."""

    kind = "text_completion"

    def __init__(self, parsed: ParsedRequest, _model: Model, head: Callable[[], dict[str, Any]]) -> None:
        self._parsed, self._head = parsed, head
        self._tally = Tally()
        self._ids = TokenIds(parsed.request)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._unsent = 0
        self._offset = 0  # of the next token in the text of all tokens

    def begin(self) -> Iterator[dict[str, Any]]:
        """Nothing: the first text is the first chunk."""
        return iter(())

    def started(self, event: Started) -> None:
        """The prompt is processed."""
        self._tally.started(event)
        self._ids.started(event)

    def notice(self, event: Notice) -> None:
        """What the reply's reader should know."""
        self._tally.notice(event)

    def step(self, event: Step) -> Iterator[dict[str, Any]]:
        """The chunk of one step, when it has text."""
        self._tally.step(event)
        self._ids.step(event)
        self._logprobs += event.logprobs
        text = "".join(piece.text for piece in event.pieces)
        if text:
            self._texts.append(text)
            yield self._chunk(text)

    def finished(self, event: Finished) -> Iterator[dict[str, Any]]:
        """The last chunks: the reason, the figures."""
        figures = {"metrics": self._tally.metrics(event)}
        last = self._chunk("", event.reason)
        if not self._parsed.include_usage:
            yield {**last, **figures}
            return
        yield last
        yield {**self._head(), "object": self.kind, "choices": [], "usage": self._tally.usage(event), **figures}

    def body(self, event: Finished) -> dict[str, Any]:
        """The whole answer; the chunks must have been drawn before."""
        self._unsent = self._offset = 0
        self._ids.rewind()
        chunk = self._chunk("".join(self._texts), event.reason)
        return {**chunk, "usage": self._tally.usage(event), "metrics": self._tally.metrics(event)}

    def _chunk(self, text: str, reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        choice |= {**self._ids.prompt(), **self._ids.reply()}
        found = self._logprobs[self._unsent :]
        if self._parsed.request.logprobs is not None and found:
            choice["logprobs"] = self._columns(found)
            self._unsent = len(self._logprobs)
        chunk = {**self._head(), "object": self.kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._parsed.include_usage else chunk

    def _columns(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's older form: one list for each thing told of the tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogprob) -> dict[str, float]:
    """The sampled token and the likeliest ones; of two that show the same text, the sampled one."""
    chosen = {token.text: finite(token.logprob)}
    return chosen | {text: finite(value) for _, text, value in token.top} | chosen
