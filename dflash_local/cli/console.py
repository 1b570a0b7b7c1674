"""The only place that prints: data to stdout, everything else to stderr, all of it harmless.

Text is made safe for terminals and encodable in the stream's encoding here and nowhere else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from dflash_local import terminal
from dflash_local.errors import DFlashError
from dflash_local.events import LoadProgress, Notice

RESET = "\x1b[0m"
STYLES = {"dim": "\x1b[2m", "bold": "\x1b[1m", "green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}


class OutputClosed(Exception):
    """Nobody reads stdout any more (``| head``): the program ends quietly."""


class Console:
    """The two output streams of one command.

    Styles are given by name and applied only where the stream is a terminal that wants colour;
    so no meaning may hang on a style alone.
    """

    def __init__(self, environ: Mapping[str, str], out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out if out is not None else sys.stdout
        self.err = err if err is not None else sys.stderr
        self._environ = environ
        self._colour_out = terminal.colour_enabled(self.out, environ)
        self._colour_err = terminal.colour_enabled(self.err, environ)
        self._progress_width = 0  # of the line of progress that stands on stderr

    @property
    def interactive(self) -> bool:
        """True when a person sits at both ends: stdin and stdout are terminals."""
        return terminal.is_terminal(sys.stdin) and terminal.is_terminal(self.out)

    @property
    def can_ask(self) -> bool:
        """True when a person can read a question on stderr and answer it on stdin."""
        return terminal.is_terminal(sys.stdin) and terminal.is_terminal(self.err)

    @property
    def live(self) -> bool:
        """True when stderr is a terminal whose lines can be written again."""
        return terminal.is_terminal(self.err) and not terminal.is_dumb(self._environ)

    @property
    def columns(self) -> int:
        """The width that data may take: that of stdout's terminal, or of ``COLUMNS``."""
        return terminal.width(stream=self.out, environ=self._environ)

    @property
    def note_columns(self) -> int:
        """The width that notes may take: that of stderr's terminal, or of ``COLUMNS``."""
        return terminal.width(stream=self.err, environ=self._environ)

    def ask(self, question: str, default: bool) -> bool:
        """A yes or no from the keyboard; an empty answer is the default, the end of input is no."""
        self.note(f"{question} [{'Y/n' if default else 'y/N'}] ", end="")
        while True:
            line = sys.stdin.readline()
            if not line:
                self.note()
                return False
            word = line.strip().lower()
            if word in ("", "y", "yes", "n", "no"):
                return default if not word else word.startswith("y")
            self.note("please answer y or n: ", end="")

    def choose(self, count: int) -> int:
        """A number from 1 to ``count`` from the keyboard; an empty answer is 1, and so is the end of input."""
        self.note(f"which one? 1 to {count} [1] ", end="")
        while True:
            line = sys.stdin.readline()
            word = line.strip()
            if not word:
                self.note("" if line else "\n", end="")
                return 1
            if word.isascii() and word.isdigit() and len(word) < 4 and 1 <= int(word) <= count:
                return int(word)
            self.note(f"please answer 1 to {count}: ", end="")

    def data(self, text: str = "", style: str = "", end: str = "\n") -> None:
        """One line for stdout, made safe: a line end in a path or a name is shown as a sign."""
        self.raw(terminal.safe_line(text), style, end)

    def data_text(self, text: str, style: str = "", end: str = "\n") -> None:
        """Text of several lines for stdout, made safe."""
        self.raw(terminal.safe(text), style, end)

    def raw(self, text: str, style: str = "", end: str = "") -> None:
        """Text for stdout that has passed ``terminal.TerminalFilter`` already."""
        self.clear_progress()
        _emit(self.out, _styled(text, style, self._colour_out) + end)

    def json(self, value: Mapping[str, Any]) -> None:
        """One JSON object on one line of stdout; all ASCII, so that no encoding can fail."""
        self.clear_progress()
        _emit(self.out, json.dumps(value, ensure_ascii=True) + "\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Lines for stdout, made safe as ``data`` does."""
        for line in lines:
            self.data(line)

    def result(self, found: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
        """What a command found: one JSON object, or lines for a person."""
        self.json(found) if as_json else self.lines(lines)

    def note(self, text: str = "", style: str = "", end: str = "\n") -> None:
        """One line for stderr, made safe as ``data`` is; lost without a word when nobody reads stderr."""
        self.raw_note(terminal.safe_line(text), style, end)

    def note_text(self, text: str, style: str = "", end: str = "\n") -> None:
        """Text of several lines for stderr, made safe."""
        self.raw_note(terminal.safe(text), style, end)

    def raw_note(self, text: str, style: str = "", end: str = "") -> None:
        """Text for stderr that has passed ``terminal.TerminalFilter`` already."""
        self.clear_progress()
        self._err(text, style, end)

    def _err(self, text: str, style: str = "", end: str = "") -> None:
        try:
            _emit(self.err, _styled(text, style, self._colour_err) + end)
        except OutputClosed:
            return

    def warn(self, text: str) -> None:
        self.note(f"warning: {text.strip()}", "yellow")

    def error(self, error: DFlashError, as_json: bool = False) -> None:
        """An error on stderr: one line and the hint, or one JSON object."""
        if as_json:
            self.raw_note(json.dumps(error.as_dict(), ensure_ascii=True) + "\n")
            return
        self.note(f"error: {error.message.strip()}", "red")
        if error.hint:
            self.note(f"hint: {error.hint.strip()}")

    def notify(self, event: Notice | LoadProgress) -> None:
        """What the application says: a dim note, a warning, or how far a load is."""
        if isinstance(event, LoadProgress):
            self.show_progress(event.stage, event.fraction)
        elif event.level == "warning":
            self.warn(event.message)
        else:
            self.note(event.message, "dim")

    def show_progress(self, text: str, fraction: float | None = None) -> None:
        """A line on stderr that is rewritten in place until anything else is said; nothing off a terminal.

        Args:
            fraction: how far it is (0..1); None where that is not known.
        """
        if self.live:
            share = "" if fraction is None else f" {fraction:.0%}"
            line = f"{terminal.safe_line(text)}{share}"[: max(10, self.note_columns - 1)]
            self._progress_width = max(self._progress_width, len(line))
            self._err(f"\r{line.ljust(self._progress_width)}")

    def clear_progress(self) -> None:
        width, self._progress_width = self._progress_width, 0
        if width:
            self._err(f"\r{' ' * width}\r")

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, float], None]]:
        """Within, progress may be shown; its line is gone at the end."""
        try:
            yield self.show_progress
        finally:
            self.clear_progress()

    def can_show(self, text: str) -> bool:
        """True when stdout's encoding has all these characters."""
        encoding = getattr(self.out, "encoding", None) or "ascii"
        return terminal.encodable(text, encoding) == text


def make_unbreakable() -> None:
    """Let no stream raise for a character that its encoding lacks (``LC_ALL=C``), nor for bad input."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def hush_stdout() -> None:
    """Point a closed stdout at nothing, so that the interpreter's last flush cannot complain."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return
    with open(os.devnull, "w", encoding="ascii") as nothing:
        os.dup2(nothing.fileno(), descriptor)


def _styled(text: str, style: str, colour: bool) -> str:
    return f"{STYLES[style]}{text}{RESET}" if style and colour and text else text


def _emit(stream: TextIO | None, text: str) -> None:
    if stream is None or stream.closed:
        raise OutputClosed
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(terminal.encodable(text, encoding), end="", file=stream, flush=True)
    except BrokenPipeError as error:
        raise OutputClosed from error
