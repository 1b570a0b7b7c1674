"""The log of a server that is launched here: how far its start is, and why it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dflash_local import terminal

TAIL = 256 * 2**10  # bytes of the end that are looked at
MAX_LINE = 300  # characters of it in one line

# (EngineCore pid=12) ERROR 11-23 12:00:00 [core.py:700] of vLLM, [2026-11-23 12:00:00 TP0] of SGLang, what(): of C++
PREFIX = re.compile(
    r"^(\([\w .=-]{1,60}\) )*([A-Z]{4,8} [\d-]+ [\d:.,]+ (\[[^\]]{1,60}\] ?)*|\[20[^\]]{1,60}\] ?|what\(\):)?"
)
FRAME = re.compile(r"^frame #\d+: ")  # of torch's C++, below what it says
FAULT = re.compile(
    r"\b[A-Za-z_.]*(Error|Exception|error)\b: *\S|\bValue error, |\bKilled\b|out of memory|Permission denied|not found"
)
FOLLOWS = ("Engine core initialization failed", "root cause above", "See stack trace")  # said after the reason itself


def last_line(log: Path) -> str:
    """The last line that says anything, safe to show, without time and process; empty where there is none."""
    return next(iter(reversed(_lines(log))), "")


def share(log: Path, stages: Sequence[str]) -> float:
    """How far a start is (0..1), by the last of its stages that the log speaks of."""
    text = _end_of(log)
    reached = [number for number, stage in enumerate(stages, 1) if stage in text]
    return max(reached, default=0) / (len(stages) + 1)


def reason(log: Path) -> str:
    """The line that says why it ended; else the last one."""
    lines = _lines(log)
    faults = [line for line in lines if FAULT.search(line)]
    own = [line for line in faults if not any(words in line for words in FOLLOWS)]
    return next(iter(reversed(own or faults or lines)), "")


def _lines(log: Path) -> list[str]:
    found = (terminal.safe_line(line).strip() for line in re.split(r"[\r\n]+", _end_of(log)))
    told = (PREFIX.sub("", each, count=1).strip() for each in found if not FRAME.match(each))
    return [line[:MAX_LINE] for line in told if line]


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            return file.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return ""
