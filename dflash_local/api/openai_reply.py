"""What chat and text completions have in common: objects of OpenAI's, with ids and log probabilities."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dflash_local.api.refusals import as_json
from dflash_local.api.reply import Reply
from dflash_local.api.request_body import ParsedRequest
from dflash_local.events import Finished, Started, Step, TokenLogprob
from dflash_local.service.backend import Model

IMPOSSIBLE = -9999.0  # what OpenAI sends for a token of no probability; JSON has no infinity


def finite(logprob: float) -> float:
    """Return a log probability as JSON can hold it."""
    return max(logprob, IMPOSSIBLE)


class OpenAIReply(Reply):
    """A completion of OpenAI's."""

    end = b"data: [DONE]\n\n"
    id_prefix: str
    kind: str  # ``object`` of a whole answer
    chunk_kind: str  # ``object`` of a chunk
    nothing: dict[str, Any]  # a choice's field for no text
    prompt_ids_in_choice: bool

    def __init__(self, parsed: ParsedRequest, model: Model, fingerprint: Callable[[], str]) -> None:
        super().__init__(parsed, model, fingerprint)
        name, created = f"{self.id_prefix}-{secrets.token_hex(16)}", int(time.time())
        self._same = {"id": name, "object": "", "created": created, "model": model.name}
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent_ids = self._sent_logprobs = 0
        self._prompt_sent = False

    @staticmethod
    def frame(chunk: dict[str, Any]) -> bytes:
        """Return a chunk as it stands in a stream."""
        return b"data: " + as_json(chunk) + b"\n\n"

    def _head(self) -> dict[str, Any]:
        return {**self._same, "system_fingerprint": self._fingerprint()}

    def body(self, event: Finished) -> dict[str, Any]:
        """Return the whole answer."""
        self._sent_ids = self._sent_logprobs = 0
        self._prompt_sent = False
        whole = {**self._chunk(self._whole(), self._reason(event)), "object": self.kind}
        return {**whole, "usage": self._tally.usage(event), "metrics": self._tally.metrics(event)}

    def _started(self, event: Started) -> Iterator[dict[str, Any]]:
        self._prompt_ids = list(event.prompt_ids)
        return iter(())

    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
        self._ids += event.token_ids
        self._logprobs += event.logprobs
        yield from self._said(event)

    @abstractmethod
    def _said(self, event: Step) -> Iterator[dict[str, Any]]:
        """Return the chunks of one step's text."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """Return the fields of the whole answer's choice."""

    @abstractmethod
    def _as_logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """Return the field ``logprobs`` of a choice."""

    def _held(self) -> Iterator[dict[str, Any]]:
        """Return the chunks of text that was held back until the end."""
        return iter(())

    def _reason(self, event: Finished) -> str:
        return event.reason

    def _last(self, event: Finished) -> Iterator[dict[str, Any]]:
        yield from self._held()
        figures = {"metrics": self._tally.metrics(event)}
        last = self._chunk(self.nothing, self._reason(event))
        if not self._parsed.include_usage:
            yield {**last, **figures}
            return
        yield last
        usage = self._tally.usage(event)
        yield {**self._head(), "object": self.chunk_kind, "choices": [], "usage": usage, **figures}

    def _chunk(self, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """Return one object, with the ids and log probabilities that were not sent yet."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, **content, "finish_reason": reason}
        chunk = {**self._head(), "object": self.chunk_kind, "choices": [choice]}
        if self._parsed.include_usage:
            chunk["usage"] = None
        if self._parsed.request.return_token_ids:
            choice["token_ids"], self._sent_ids = self._ids[self._sent_ids :], len(self._ids)
            if self._prompt_ids is not None and not self._prompt_sent:
                (choice if self.prompt_ids_in_choice else chunk)["prompt_token_ids"] = self._prompt_ids
                self._prompt_sent = True
        unsent = self._logprobs[self._sent_logprobs :]
        if self._parsed.request.logprobs is not None and unsent:
            by_id = self._parsed.record.return_tokens_as_token_ids
            choice["logprobs"] = self._as_logprobs([_named_by_id(one) for one in unsent] if by_id else unsent)
            self._sent_logprobs = len(self._logprobs)
        return chunk


def _named_by_id(token: TokenLogprob) -> TokenLogprob:
    """Return it with each token's number in place of its text, as vLLM names them: ``token_id:42``."""
    top = tuple((number, f"token_id:{number}", value, data) for number, _, value, data in token.top)
    return replace(token, text=f"token_id:{token.token_id}", top=top)
