"""A streamed reply: server-sent events, and when a reply that does not end is given up."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local import terminal
from dflash_local.errors import ServerError
from dflash_local.events import Notice, Step
from dflash_local.remote.endpoint import (
    FAILURES,
    MAX_ANSWER,
    Exchange,
    ServerEndpoint,
    Wait,
    message_of,
    read_object,
    reason_of,
)
from dflash_local.request import MAX_MESSAGE_CHARS

MAX_IDLE = 2 * MAX_ANSWER  # bytes without a part of the reply: keep-alives, and an event with the ids of the prompt
LINE_BYTES = 256  # that a line counts as beside its own: reading many short ones takes long
SPARE_TOKENS = 100  # parts of a reply that need no token of their own: names of tools, ends of channels
SHOWN = 60  # characters of a line that is no event
FIELDS = (b"event", b"id", b"retry", b"")  # of server-sent events, besides data; an empty one is a comment


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may take, in seconds. Comments, keep-alives and events without text do not count.

    Attributes:
        first: to the first text: other requests and a long prompt may come before it. silence: between two texts.
        notice: after so long without a first text a line says that it is waited for.
    """

    first: float = 600.0
    silence: float = 120.0
    notice: float = 10.0


PATIENCE = Patience()


class EventStream:
    """One POST request and the server-sent events of its answer; ``advance`` is called for each part of the reply.

    Args:
        most: tokens that were asked for.

    Raises (while its lines are read):
        DFlashError: the request was refused. ServerError: the server is gone, sends nothing of the reply for too long,
            or more of it than was asked for.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        path: str,
        body: Mapping[str, Any],
        most: int,
        patience: Patience,
    ) -> None:
        self._endpoint, self._most, self._patience = endpoint, most, patience
        self._exchange = Exchange(endpoint, "POST", path, body, lines=True)
        self._since = time.monotonic()  # of the last part, and bytes since
        self._idle = 0
        self._begun = False
        self._parts = self._characters = 0

    def _lines(self, cancelled: Callable[[], bool]) -> Iterator[bytes | Notice]:
        """The lines as they come, and what the user should know; ends with the answer, or when cancelled."""
        notice_at = self._since + self._patience.notice
        status = 0
        while True:
            until = self._since + (self._patience.silence if self._begun else self._patience.first)
            try:
                found = self._exchange.next(Wait(until if self._begun else min(until, notice_at), cancelled))
            except FAILURES as error:
                lost = broken_off(self._endpoint.url, reason_of(error))
                raise (lost if status == http.client.OK else self._endpoint.unreachable(error)) from error
            if cancelled():
                return
            if found is None and time.monotonic() < until:
                notice_at = until
                yield Notice(f"waiting for the first token of the server at {self._endpoint.url}")
            elif found is None:
                when = "in the middle of a reply" if self._begun else "and has not begun the reply"
                raise self._given_up(f"sends no text for {time.monotonic() - self._since:.0f} s {when}")
            elif isinstance(found, int):
                status = found
            elif status != http.client.OK:
                raise self._endpoint.refusal(status, found)
            elif not found:
                return
            else:
                self._idle += LINE_BYTES + len(found)
                if self._idle > MAX_IDLE:
                    raise self._given_up("sends line after line without any text")
                yield found

    def advance(self, step: Step) -> None:
        """A part of the reply has come. ServerError: it is more than was asked for."""
        self._since, self._idle, self._begun = time.monotonic(), 0, True
        self._parts += max(1, len(step.pieces), len(step.token_ids), len(step.logprobs))
        self._characters += sum(len(piece.text) for piece in step.pieces)
        if self._parts > 2 * self._most + SPARE_TOKENS or self._characters > MAX_MESSAGE_CHARS:
            raise self._given_up(f"sends more than the {self._most} tokens that were asked for")

    def close(self) -> None:
        """Hang up."""
        self._exchange.close()

    def _given_up(self, why: str) -> ServerError:
        return ServerError(
            f"the server at {self._endpoint.url} {why}", "the request was given up; the next message asks it again"
        )

    def events(self, cancelled: Callable[[], bool]) -> Iterator[dict[str, Any] | Notice]:
        """The JSON objects of the answer, and what the user should know; ends with the answer, or when cancelled."""
        reported = False
        for line in self._lines(cancelled):
            if isinstance(line, Notice):
                yield line
                continue
            name, _, value = line.strip().partition(b":")
            if name in FIELDS:
                continue
            if name == b"data" and value.strip() == b"[DONE]":
                return
            content = read_object(value) if name == b"data" else None
            if content is not None:
                yield content
            elif not reported:
                reported = True
                shown = terminal.safe_line(line[: 4 * SHOWN].decode("utf-8", "replace").strip())[:SHOWN]
                yield Notice(f"the server sent what is no event, which is left out: {shown}", "warning")


def broken_off(url: str, reason: str) -> ServerError:
    """The error of an answer that ended before its end."""
    return ServerError(
        f"the server at {url} broke off in the middle of the reply: {reason}",
        "what came is kept; the next message asks it again",
    )


def stream_error(content: Mapping[str, Any]) -> str:
    """The message of an event that reports an error; empty for any other event."""
    if content.get("error") is None and content.get("object") != "error":
        return ""
    return message_of(content) or "without a message"
