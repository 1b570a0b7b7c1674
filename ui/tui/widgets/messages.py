"""What stands between the replies: the user's own messages, and what the program says."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from dflash_local.terminal import safe

MAX_LINES = 20  # of one message on screen, or so many characters: what was pasted is not read here
MAX_SHOWN = 2_000


class UserMessage(Static):
    """A message as it was sent, and a remark on it."""

    def __init__(self, text: str, remark: str = "") -> None:
        shown = _beginning(safe(text))
        if remark:
            shown = f"{shown}\n[{remark}]"
        super().__init__(Content(shown), classes="user")


class Note(Static):
    """What the program says; a warning or an error begins with its word."""

    def __init__(self, text: str, level: str = "note") -> None:
        lead = "" if level == "note" else f"{level}: "
        super().__init__(Content(lead + safe(text).strip("\n")), classes=level)


def _beginning(text: str) -> str:
    """As much of a message as is shown, and how much more there is."""
    lines = text.split("\n")
    begin = "\n".join(lines[:MAX_LINES])
    if len(begin) > MAX_SHOWN:
        return f"{text[:MAX_SHOWN]}\n[{len(text) - MAX_SHOWN:,} more characters were sent]"
    more = len(lines) - MAX_LINES
    return f"{begin}\n[{more:,} more line{'s' if more > 1 else ''} were sent]" if more > 0 else text
