"""The last errors that users were shown, without their values: class, message template, place in the source.

A template is the literal of the source that the message was made from, so no prompt, name or path can be in it.
"""

from __future__ import annotations

import ast
import json
import re
import traceback
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from dflash_local import __version__
from dflash_local.errors import DFlashError
from dflash_local.json_text import parse_json
from dflash_local.store.kept import keep

FILE = "errors.json"
KEPT = 20
FRAMES = 6  # of the traceback, the innermost ones
MAX_BYTES = 2**18
LEFT_OUT = "…"
LEAST_LETTERS = 8  # of a literal, below which it fits anything
PACKAGE = Path(__file__).resolve().parents[1]
_NUMBER = re.compile(r"-?[\d.,]{1,12}( ?([KMG]i?B|s|ms|tokens|%))?")


def remember(folder: Path, command: str, error: DFlashError) -> None:
    """Add an error to the log in a folder; a log that cannot be written is none."""
    entry = {
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "error": error.kind,
        "cause": type(error.__cause__).__name__ if error.__cause__ is not None else None,
        "message": template(error),
        "exit_code": error.exit_code,
        "where": places(error),
        "version": __version__,
    }
    keep(folder / FILE, json.dumps([*read(folder), entry][-KEPT:], indent=1) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """What the log holds, the oldest first; nothing of a damaged one."""
    try:
        with (folder / FILE).open("rb") as file:
            content = parse_json(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return []
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def template(error: DFlashError) -> str:
    """The literal that a message was made from, with ``…`` for each value that is no number; empty if none is found."""
    named = [frame.filename for frame in reversed(traceback.extract_tb(error.__traceback__))]
    paths = dict.fromkeys(Path(name) for name in named if _inside(name))  # the innermost first
    return max((match for path in paths for match in _matches(error.message, path)), default=(0, ""))[1]


def places(error: BaseException) -> list[str]:
    """``engine/session.py:84 in load`` for the innermost frames of this package, an error's cause included."""
    lines: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        frames = traceback.extract_tb(one.__traceback__)
        inside = [(_inside(frame.filename), frame) for frame in frames]
        lines = [f"{name}:{frame.lineno} in {frame.name}" for name, frame in inside if name] or lines
        one = one.__cause__
    return lines[-FRAMES:]


def _inside(filename: str) -> str:
    """A file's path in this package; empty for any other file."""
    try:
        return Path(filename).resolve().relative_to(PACKAGE).as_posix()
    except (ValueError, OSError):
        return ""


def _matches(message: str, path: Path) -> Iterator[tuple[int, str]]:
    """Letters of each literal that the message may have been made from, and its template."""
    for parts in _literals(path):
        letters = sum(character.isalpha() for part in parts for character in part)
        if letters < LEAST_LETTERS:
            continue
        values = _values(message, parts)
        if values is not None:
            kept = [value if _NUMBER.fullmatch(value) else LEFT_OUT for value in values]
            yield letters, "".join(part + value for part, value in zip(parts, [*kept, ""]))


def _values(message: str, parts: tuple[str, ...]) -> list[str] | None:
    """What stands between the parts, each part at its first place; None where the message is not made of them."""
    first, *rest = parts
    if not message.startswith(first) or (not rest and message != first):
        return None
    at, values = len(first), []
    for number, part in enumerate(rest, 1):
        found = message.find(part, at) if number < len(rest) else len(message) - len(part)
        if found < at or not message.startswith(part, found):
            return None
        values.append(message[at:found])
        at = found + len(part)
    return values


@cache
def _literals(path: Path) -> tuple[tuple[str, ...], ...]:
    """Texts of a module, each as the parts between its values."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts = (str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)
            found.append(tuple("".join(texts).split("\0")))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.value,))
    return tuple(found)
