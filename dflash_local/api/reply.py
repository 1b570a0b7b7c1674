"""Events to the objects of an OpenAI answer: what chat and text completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from dflash_local.api.endpoint import cut_off
from dflash_local.api.figures import Tally
from dflash_local.api.log import LOGGER
from dflash_local.api.request_fields import ParsedRequest
from dflash_local.events import Event, Finished, Notice, Started, Step, TokenLogprob


class Reply(ABC):
    """One reply, streamed (``begin``, then ``chunks`` of every event) or whole (``body``, after ``chunks`` of all).

    Args:
        head: id, created, model and system_fingerprint of every object.
    """

    kind: str  # ``object`` of a whole answer
    chunk_kind: str  # ``object`` of a chunk
    nothing: dict[str, Any]  # a choice's field for no text
    prompt_ids_in_choice: bool

    def __init__(self, parsed: ParsedRequest, head: Callable[[], dict[str, Any]]) -> None:
        self._parsed, self._head = parsed, head
        self._tally = Tally()
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sent_ids = self._sent_logprobs = 0
        self._prompt_sent = False

    def begin(self) -> Iterator[dict[str, Any]]:
        """The chunks before those of events."""
        return iter(())

    def chunks(self, event: Event | None) -> Iterator[dict[str, Any]]:
        """The chunks that an event becomes.

        Raises:
            Refusal: the reply was cancelled, and not by its client: the model is being unloaded or the server ends.
        """
        if isinstance(event, Started):
            self._tally.reused, self._prompt_ids = event.reused_tokens, list(event.prompt_ids)
        elif isinstance(event, Notice):
            self._tally.notices.append(event.message)
            if event.level == "warning":
                LOGGER.warning("%s", event.message)
        elif isinstance(event, Step):
            self._tally.drafted += event.drafted
            self._ids += event.token_ids
            self._logprobs += event.logprobs
            yield from self._step(event)
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise cut_off()
            yield from self._last(event)

    def body(self, event: Finished) -> dict[str, Any]:
        """The whole answer."""
        self._sent_ids = self._sent_logprobs = 0
        self._prompt_sent = False
        whole = {**self._chunk(self._whole(), self._reason(event)), "object": self.kind}
        return {**whole, "usage": self._tally.usage(event), "metrics": self._tally.metrics(event)}

    @abstractmethod
    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
        """The chunks of one step's text."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """The fields of the whole answer's choice."""

    @abstractmethod
    def _as_logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """The field ``logprobs`` of a choice."""

    def _held(self) -> Iterator[dict[str, Any]]:
        """The chunks of text that was held back until the end."""
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
        """One object, with the ids and log probabilities that were not sent yet."""
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
            choice["logprobs"] = self._as_logprobs(unsent)
            self._sent_logprobs = len(self._logprobs)
        return chunk
