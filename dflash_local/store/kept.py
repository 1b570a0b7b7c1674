"""Files that save time, or inform a later start: one that cannot be written ends nothing, and is reported once."""

from __future__ import annotations

from pathlib import Path

from dflash_local.store.atomic import write_atomic

_unkept: dict[Path, str] = {}  # why nothing could be written, by folder, since it was told


def keep(path: Path, data: bytes | str) -> bool:
    """Write a file as ``write_atomic`` does; False where the disk is full or read-only."""
    try:
        write_atomic(path, data)
    except OSError as error:
        _unkept[path.parent] = error.strerror or type(error).__name__
        return False
    return True


def take_unkept() -> str:
    """A line on the folders that could not be written since the last call; empty where there are none."""
    found = "; ".join(f"{folder} ({why})" for folder, why in sorted(_unkept.items()))
    _unkept.clear()
    return f"nothing can be kept in {found}: later starts do without it" if found else ""
