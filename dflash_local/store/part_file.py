"""A blob on its way into the cache: written and hashed under a name of its own, and named once it is proven.

What was written stays when a pull ends early, under a name that tells it from the partial files of other programs;
a later pull takes it by renaming it, which only one of several can.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from dflash_local.store.cache import PART, Cache
from dflash_local.store.file_download import NotTheFile, TooLong
from dflash_local.store.hub import RemoteFile
from dflash_local.store.names import file_parts
from dflash_local.store.verify import Proof


class PartFile:
    """Holds the part of a blob: use it as a context, write to it, finish it.

    Args:
        left: what an earlier pull left of it; hashed and taken up when it is still there. ``size``: bytes so far.
        on_piece: as of ``Proof.read``, for what was left.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, blobs: Path, file: RemoteFile, left: Path | None, on_piece: Callable[[int], None]) -> None:
        blobs.mkdir(parents=True, exist_ok=True)
        self._blob, self._proof = blobs / file.etag, Proof(file)
        self.path = blobs / f"{file.etag}{PART}{secrets.token_hex(4)}.incomplete"
        begun = _take(left, self.path, file.size)
        # Unbuffered: what is not written is lost with the process.
        self._output = self.path.open("r+b" if begun else "wb", buffering=0)
        if begun:
            self._proof.read(self._output, on_piece)

    @property
    def size(self) -> int:
        return self._proof.size

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Keep what may be right."""
        self._output.close()
        if self.size == 0 or (kind and issubclass(kind, TooLong)):
            self.path.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """Append a piece. Raises OSError."""
        rest = memoryview(piece)
        while rest:
            rest = rest[self._output.write(rest) :]
        self._proof.update(piece)

    def finish(self) -> str:
        """Name the blob and return its sha256. NotTheFile: a wrong one, deleted. OSError."""
        try:
            sha256 = self._proof.result()
        except NotTheFile:
            self.path.unlink(missing_ok=True)
            raise
        os.replace(self.path, self._blob)
        return sha256


def _take(left: Path | None, path: Path, size: int) -> bool:
    """Rename what an earlier pull left; returns False when there is none or it is too long."""
    if left is None:
        return False
    try:
        os.rename(left, path)
    except OSError:  # another pull was faster, or it is gone
        return False
    if os.lstat(path).st_size > size:
        path.unlink()
        return False
    return True


def link(cache: Cache, repo: str, commit: str, file: RemoteFile) -> None:
    """Enter a blob into a snapshot as huggingface_hub does: a relative link, else a copy. OSError, DownloadError."""
    blob = cache.repo_folder(repo) / "blobs" / file.etag
    path = cache.snapshot(repo, commit).joinpath(*file_parts(repo, file.path))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.symlink(os.path.relpath(blob, path.parent), path)
    except FileExistsError:  # of a blob that was gone, or of another pull
        pass
    except (OSError, NotImplementedError):
        if os.path.lexists(path) or not os.access(path.parent, os.W_OK):
            raise
        shutil.copyfile(blob, path)
