"""Files that save time, or inform a later start: one that cannot be written ends nothing, and is reported once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dflash_local.json_text import parse_json
from dflash_local.store.atomic import Data, write_atomic

Kept = TypeVar("Kept")

_unkept: dict[Path, str] = {}  # why nothing could be written, by folder, since it was told


def keep(path: Path, data: Data) -> bool:
    """Write a file as ``write_atomic`` does; False where the disk is full or read-only."""
    try:
        write_atomic(path, data)
    except OSError as error:
        _unkept[path.parent] = error.strerror or type(error).__name__
        return False
    return True


def read_kept(path: Path | None, read: Callable[[Any], Kept]) -> Kept | None:
    """Read a JSON file that was kept; None where there is none, or ``read`` cannot make sense of what is in it."""
    try:
        return None if path is None else read(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def take_unkept() -> str:
    """Tell in a line the folders that could not be written since the last call; empty where there are none."""
    found = "; ".join(f"{folder} ({why})" for folder, why in sorted(_unkept.items()))
    _unkept.clear()
    return f"nothing can be kept in {found}: later starts do without it" if found else ""
