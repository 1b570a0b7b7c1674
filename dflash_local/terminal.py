"""Text that is safe to write to a terminal, sizes and times in words, and what a stream can show."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, TextIO

MAX_MARKS = 8  # zero-width characters kept per cell; the longest emoji and Hebrew or Tibetan stacks need fewer
DEFAULT_WIDTH = 80
# Everything that may need work: controls, and any character that may take no cell of its own.
_SUSPECT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u0300-\U0010ffff]")
_DIRECTION_MARKS = frozenset("\u061c\u200e\u200f")
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_ZERO_WIDTH = frozenset(("Mn", "Me", "Cf"))


class TerminalFilter:
    """Makes model text safe while it streams; feeding it in any bits gives the same result.

    Every control character becomes a visible sign (ESC is shown as ``␛``, BEL as ``␇``, C1 as
    ``\\x9b``), so no sequence of any kind, whole or cut, reaches the terminal; what followed it is
    plain text. Bidirectional overrides become ``\\u202e`` and the like, invisible direction marks go,
    zero-width characters beyond eight per cell go, lone surrogates become U+FFFD. Newlines (also
    ``\\r\\n``) and tabs stay.
    """

    def __init__(self) -> None:
        self._marks = 0
        self._return = False

    def feed(self, text: str) -> str:
        """Return the safe form of the next bit of text. A carriage return waits for what follows it."""
        if not text:
            return ""
        if not self._return and not _SUSPECT.search(text):
            self._marks = 0
            return text
        return "".join(map(self._character, text))

    def finish(self) -> str:
        """Return what was held back; the filter is as new afterwards."""
        held, self._return, self._marks = "␍" if self._return else "", False, 0
        return held

    def _character(self, character: str) -> str:
        held, self._return = "␍" if self._return and character != "\n" else "", False
        if held:
            self._marks = 0
        if character == "\r":
            self._return = True
            return held
        sign = _visible(character)
        if sign == character and unicodedata.category(character) in _ZERO_WIDTH:
            self._marks += 1
            return held + (character if self._marks <= MAX_MARKS else "")
        if sign:
            self._marks = 0
        return held + sign


def _visible(character: str) -> str:
    """Return the character itself when it is harmless, else what is shown instead of it."""
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if code < 0xA0:
        return f"\\x{code:02x}" if code >= 0x80 else character
    if character in _DIRECTION_MARKS:
        return ""
    if character in _BIDI:
        return f"\\u{code:04x}"
    if character in "\u2028\u2029":  # line and paragraph separator: screens disagree on them
        return "\n"
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else character


def safe(text: str) -> str:
    """Return the safe form of a whole text, see ``TerminalFilter``."""
    once = TerminalFilter()
    return once.feed(text) + once.finish()


def safe_line(text: str) -> str:
    """Return what ``safe`` does, on one line: newlines and tabs are shown as signs (for logs, names and errors)."""
    return safe(text).replace("\n", "␊").replace("\t", "␉")


def encodable(text: str, encoding: str | None) -> str:
    """Return ``text`` with ``?`` for what the encoding cannot write; unknown ones count as ASCII."""
    try:
        return text.encode(encoding or "ascii", "replace").decode(encoding or "ascii", "replace")
    except LookupError:
        return text.encode("ascii", "replace").decode("ascii")


def is_terminal(stream: Any) -> bool:
    """Return whether the stream is an open terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a stream, or closed
        return False


def is_dumb(environ: Mapping[str, str]) -> bool:
    """Return whether ``TERM`` says that the terminal knows no control sequences."""
    return environ.get("TERM", "").strip().lower() in ("dumb", "unknown")


def colour_enabled(stream: Any, environ: Mapping[str, str]) -> bool:
    """Return whether to colour: on a terminal that is not dumb, unless ``NO_COLOR`` is set (no-color.org)."""
    return is_terminal(stream) and not environ.get("NO_COLOR") and not is_dumb(environ)


def width(
    default: int = DEFAULT_WIDTH, *, stream: TextIO | None = None, environ: Mapping[str, str] | None = None
) -> int:
    """Return the columns: ``COLUMNS`` where it is a positive number, else the stream's terminal, else ``default``."""
    columns = (environ or {}).get("COLUMNS", "").strip()
    if columns.isascii() and columns.isdecimal() and 0 < int(columns[:6]):
        return int(columns[:6])
    try:
        found = os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError, AttributeError):  # no terminal, closed, or no descriptor
        found = 0
    return found if found > 0 else default


def byte_size(count: float) -> str:
    """Return a size as people read it, with the unit: ``17.98 GiB``, ``49.5 MiB``, ``640 B``."""
    gib, mib, kib = count / 2**30, count / 2**20, count / 2**10
    if gib >= 0.1:
        return f"{gib:,.1f} GiB" if gib >= 999.95 else f"{gib:.2f} GiB"
    if mib >= 0.1:
        return f"{mib:.1f} MiB"
    return f"{kib:.1f} KiB" if kib >= 1 else f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return a time in words: ``45 s``, ``4m28s``, ``2h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
