"""A reply on a terminal: its text as it comes, and what Ctrl-C means meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from dflash_local import terminal
from dflash_local.cli.console import Console
from dflash_local.events import Channel, Event, Notice, Origin, Step

if TYPE_CHECKING:
    from dflash_local.service.gathered import Answer


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


def print_reply(answer: Answer, console: Console) -> None:
    """Print a reply as it comes; Ctrl-C once ends it early, keeping what came.

    Raises:
        DFlashError: the request failed.
        KeyboardInterrupt: Ctrl-C twice.
    """
    printer = ReplyPrinter(console)
    try:
        with first_interrupt(answer.cancel):
            for event in answer:
                printer(event)
    finally:
        printer.finish()


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
                self._show(self._filter.feed(piece.text), piece.origin)
        elif isinstance(event, Notice):
            self._console.notify(event)

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

    def _show(self, text: str, origin: Origin) -> None:
        """Print a piece's safe text; a subclass may mark it by where it came from."""
        self._put(text)

    def _put(self, text: str, style: str = "") -> None:
        if not text:
            return
        if self._channel == "final":
            self._console.raw(text, style)
            self._at_line_start = text.endswith("\n")
        else:
            self._console.raw_note(text, "dim")


class MarkedPrinter(ReplyPrinter):
    """Prints a reply with the target's own tokens in brackets, and in colour where there is any."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._open, self._close = ("‹", "›") if console.can_show("‹›") else ("[", "]")
        self._line_end, self._space = ("↵", "␣") if console.can_show("↵␣") else ("\\n", " ")

    @property
    def legend(self) -> str:
        return f"drafted and accepted, {self._open}chosen by the target itself{self._close}"

    def _show(self, text: str, origin: Origin) -> None:
        if not text or origin != "bonus" or self._channel != "final":
            self._put(text, "green")
            return
        # Brackets stand around the visible part, or a sign for what has none, so that a line end stays one.
        core = text.strip()
        before, _, after = text.partition(core) if core else ("", "", text)
        if not core:
            core, after = (self._line_end, text) if "\n" in text else (self._space, text[1:])
        self._put(before)
        self._put(f"{self._open}{core}{self._close}", "yellow")
        self._put(after)
