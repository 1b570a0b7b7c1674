"""Whole-file writes that either happen or do not, and folders nobody else can read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Data = bytes | str | Iterable[bytes | memoryview]  # in pieces where it is large
FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_private(folder: Path) -> None:
    """Create the folder and its missing parents, each 0700 whatever the umask says."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(path, FOLDER_MODE)


def write_atomic(path: Path, data: Data, mode: int = FILE_MODE) -> None:
    """Replace the file with the data: readers see the old content or the new, never a part. OSError: it failed."""
    pieces = (data.encode("utf-8"),) if isinstance(data, str) else (data,) if isinstance(data, bytes) else data
    make_private(path.parent)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if hasattr(os, "fchmod"):  # the umask may have taken bits away
                os.fchmod(file.fileno(), mode)
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # after a successful rename it is gone already
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name in the folder survive a power cut, where the system offers it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it; the file itself is synced
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
