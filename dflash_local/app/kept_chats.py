"""The chats on disk as people choose among them: by a number of the list, a name, or the beginning of a title."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dflash_local.errors import UsageError
from dflash_local.store import history
from dflash_local.store.history import ChatEntry
from dflash_local.tables import Column, cut, table

SHOWN = 20
WIDTH, MODEL = 80, 20  # columns
COLUMNS = (
    Column("", right=True),
    Column("CHAT", shrinks=True),
    Column("AGE"),
    Column("MODEL"),
    Column("MESSAGES", right=True),
)
UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def chosen(folder: Path | None, argument: str) -> ChatEntry:
    """Return the chat that a user means. UsageError: there is none."""
    listed = history.entries(folder)
    number = int(argument) if argument.isascii() and argument.isdecimal() and len(argument) < 5 else 0
    if 0 < number <= len(listed) and all(entry.name != argument for entry in listed):
        return listed[number - 1]
    return history.find(folder, argument)


def newest(folder: Path | None) -> ChatEntry:
    """Return the chat that was talked in last. UsageError: there is none."""
    listed = history.entries(folder)
    if not listed:
        raise UsageError("there is no chat to go on with", "dflash chat begins one")
    return listed[0]


def listing(entries: Sequence[ChatEntry], width: int = WIDTH) -> list[str]:
    """Write the newest chats as a table whose numbers ``chosen`` takes."""
    now = time.time()
    shown = [
        (str(number), entry.title, age(now - entry.modified), cut(entry.model, MODEL), str(entry.turns))
        for number, entry in enumerate(entries[:SHOWN], 1)
    ]
    older = len(entries) - len(shown)
    return [*table(COLUMNS, shown, width), *([f"and {older} older"] if older else [])]


def age(seconds: float) -> str:
    """Write how long ago something was, in the largest unit that it fills."""
    for size, unit in UNITS:
        count = int(seconds / size)
        if count:
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
