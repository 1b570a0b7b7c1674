"""Follows one request from submit to end, for every command: text on its way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from dflash_local import terminal
from dflash_local.cli.console import Console
from dflash_local.events import Channel, Event, Finished, Notice, Step


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request. ``stopped``: the user pressed Ctrl-C while it came."""

    text: str
    thinking: str
    token_ids: tuple[int, ...]
    finished: Finished
    stopped: bool


class Source(Protocol):
    """A request on its way: a service's ticket or a conversation's answer."""

    def events(self) -> Iterator[Event]: ...

    def cancel(self) -> None: ...

    @property
    def cancelled(self) -> bool: ...


@contextmanager
def first_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Within, the first Ctrl-C acts and the second raises KeyboardInterrupt.

    An exception in the middle of reading events could lose one; a handler cannot.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt
        act()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def follow(source: Source, show: Callable[[Event], None]) -> Reply:
    """Show every event and gather the reply; Ctrl-C once ends it early, keeping what came.

    Raises:
        DFlashError: the request failed.
        KeyboardInterrupt: Ctrl-C twice.
    """
    texts: dict[Channel, list[str]] = {"final": [], "thinking": [], "tool": []}
    ids: list[int] = []
    finished: Finished | None = None
    with first_interrupt(source.cancel):
        for event in source.events():
            show(event)
            if isinstance(event, Step):
                ids.extend(event.token_ids)
                for piece in event.pieces:
                    texts[piece.channel].append(piece.text)
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None  # the service ends every ticket with Finished or an error
    return Reply("".join(texts["final"]), "".join(texts["thinking"]), tuple(ids), finished, source.cancelled)


class ReplyPrinter:
    """Prints a reply as it comes: its text to stdout, its thinking dimmed and marked to stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._channel: Channel = "final"
        self._filter = terminal.TerminalFilter()
        self._at_line_start = True

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            for piece in event.pieces:
                self._switch(piece.channel)
                self._put(self._filter.feed(piece.text))
        elif isinstance(event, Notice):
            self._console.warn(event.message) if event.level == "warning" else self._console.note(event.message, "dim")

    def finish(self) -> None:
        """Show what was held back and end the line; also after an error."""
        self._switch("final")
        self._put(self._filter.finish())
        if not self._at_line_start:
            self._console.raw("\n")

    def _switch(self, channel: Channel) -> None:
        if channel == self._channel:
            return
        self._put(self._filter.finish())
        self._filter = terminal.TerminalFilter()
        if self._channel != "final":
            self._console.note()
            self._console.note(f"[end of {self._channel}]", "dim")
        if channel != "final":
            self._console.note(f"[{channel}]", "dim")
        self._channel = channel

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._channel == "final":
            self._console.raw(text)
            self._at_line_start = text.endswith("\n")
        else:
            self._console.raw_note(text, "dim")
