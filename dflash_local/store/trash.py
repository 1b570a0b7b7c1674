"""Deleting without halves: what goes is renamed out of sight first, and deleted under its new name.

Knows the layout of a cache, not who owns or needs what lies there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_local.store.cache import Cache
from dflash_local.store.names import REMOVING
from dflash_local.store.owner import started


class TrashFolder:
    """A folder beside a repo's, named ``<repo folder>.removing-<process>-<random>``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder.with_name(f"{folder.name}{REMOVING}{os.getpid()}-{secrets.token_hex(4)}")
        self._moved: list[tuple[Path, Path]] = []

    def take_all(self) -> None:
        """The whole repo in one rename. Raises OSError."""
        os.rename(self.folder, self.path)
        self._moved.append((self.folder, self.path))

    def take(self, path: Path) -> None:
        """One file of the repo. Raises OSError."""
        target = self.path / path.relative_to(self.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, target)
        self._moved.append((path, target))

    def give_back(self) -> None:
        """Everything to where it was, as far as that is possible."""
        for source, target in reversed(self._moved):
            with suppress(OSError):
                os.rename(target, source)
        self._moved.clear()


def leftovers(cache: Cache, folder: str = "*") -> list[Path]:
    """Trash folders whose process is gone (or is this one), of one repo's folder or of all."""
    found = []
    for trash_folder in cache.folder.glob(f"models--{folder.removeprefix('models--')}{REMOVING}*"):
        pid = trash_folder.name.rpartition(REMOVING)[2].split("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or started(int(pid)) is None):
            found.append(trash_folder)
    return sorted(found)


def deleted(cache: Cache, trash_folder: Path) -> int:
    """Delete a trash folder, and of the store shared between repos what nobody links to any more.

    Returns: the bytes freed. Raises OSError.
    """
    if trash_folder.is_symlink():
        trash_folder.unlink()
        return 0
    files = list(_below(trash_folder))
    stored = {path: shared for path in files if (shared := cache.shared_blob(path)) is not None}
    freed = sum(map(_plain_size, files)) + _swept(cache, stored)
    with suppress(FileNotFoundError):  # another removal clears the same leftover
        shutil.rmtree(trash_folder)
    return freed


def size_of(cache: Cache, path: Path) -> int:
    """Bytes that deleting a file or folder of the cache frees.

    A file in the shared store counts when its list names no other repo.
    """
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(cache, file) for file in _below(path))
    shared = cache.shared_blob(path)
    if shared is None:
        return _plain_size(path)
    repo = path.relative_to(cache.folder).parts[0].split(REMOVING)[0]
    try:
        holders = shared.with_name(f"{shared.name}.refs").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return _plain_size(shared) if all(line.startswith(f"{repo}/") for line in holders) else 0


def _swept(cache: Cache, stored: Mapping[Path, Path]) -> int:
    """Delete links into the shared store, and of it what nobody else links to; returns the bytes freed.

    Its locks and lists are huggingface_hub's alone, which has had such a store since its strategies know their cache.
    """
    if not stored:
        return 0
    import huggingface_hub

    known = {field.name for field in fields(huggingface_hub.DeleteCacheStrategy)}
    if "cache_dir" not in known:
        return 0
    sizes = {file: _plain_size(file) for file in stored.values()}
    options: dict[str, Any] = {name: frozenset() for name in ("refs", "repos", "snapshots")}
    options |= {"expected_freed_size": sum(sizes.values()), "blobs": frozenset(stored), "cache_dir": cache.folder}
    huggingface_hub.DeleteCacheStrategy(**options).execute()
    return sum(size for file, size in sizes.items() if not file.exists())


def _plain_size(path: Path) -> int:
    try:
        kind = os.lstat(path)
    except FileNotFoundError:
        return 0
    return kind.st_size if stat.S_ISREG(kind.st_mode) and kind.st_nlink == 1 else 0


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (Path(place, name) for name in (*files, *links))
