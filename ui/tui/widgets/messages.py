"""What stands between the replies: the user's own messages, and what the program says."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from dflash_local.terminal import safe

MAX_SHOWN = 20_000  # characters of one message on screen


class UserMessage(Static):
    """A message as it was sent, and a remark on it."""

    def __init__(self, text: str, remark: str = "") -> None:
        shown = safe(text)
        if len(shown) > MAX_SHOWN:
            shown = f"{shown[:MAX_SHOWN]}\n[{len(shown) - MAX_SHOWN:,} more characters were sent]"
        if remark:
            shown = f"{shown}\n[{remark}]"
        super().__init__(Content(shown), classes="user")


class Note(Static):
    """What the program says; a warning or an error begins with its word."""

    def __init__(self, text: str, level: str = "note") -> None:
        lead = "" if level == "note" else f"{level}: "
        super().__init__(Content(lead + safe(text).strip("\n")), classes=level)
