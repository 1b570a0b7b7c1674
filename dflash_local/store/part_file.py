"""A blob on its way into the cache: written by one thread, hashed by another that follows it, named once it is proven.

What was written stays when a pull ends early, under a name that tells it from the partial files of other programs;
a later pull takes it by renaming it, which only one of several can.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import threading
from pathlib import Path

from dflash_local.store.cache import PART, Cache
from dflash_local.store.file_download import NotTheFile, TooLong
from dflash_local.store.hub import RemoteFile
from dflash_local.store.names import file_parts
from dflash_local.store.verify import Proof

PIECE = 1 << 20  # bytes hashed at once, small enough for a processor's cache


class PartFile:
    """The part of a blob: use as a context, write to it, finish it.

    Args:
        left: what an earlier pull left of it; taken up when it is still there. ``size``: bytes of it so far.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, blobs: Path, file: RemoteFile, left: Path | None = None) -> None:
        blobs.mkdir(parents=True, exist_ok=True)
        self._blob = blobs / file.etag
        self.path = blobs / f"{file.etag}{PART}{secrets.token_hex(4)}.incomplete"
        self.size = _taken(left, self.path, file.size)
        self._output = self.path.open("r+b" if self.size else "wb", buffering=0)
        self._output.seek(self.size)
        self._proof = Proof(file)
        self._ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._given_up = False
        self._error: OSError | None = None
        self._follower = threading.Thread(target=self._follow, name=f"hash-{file.etag[:8]}", daemon=True)
        self._follower.start()
        self._ends.put(self.size)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Keep what may be right."""
        self._given_up = True
        self._ends.put(None)
        self._output.close()
        if self.size == 0 or (kind and issubclass(kind, TooLong)):
            self.discard()

    def write(self, block: bytes) -> None:
        """Append a block. Raises OSError."""
        rest = memoryview(block)
        while rest:
            count = self._output.write(rest)
            self.size += count
            rest = rest[count:]
        self._ends.put(self.size)

    def finish(self) -> str:
        """Wait for the hash, name the blob, return its sha256. NotTheFile: a wrong one, deleted then. OSError."""
        self._ends.put(None)
        self._follower.join()
        if self._error is not None:
            raise self._error
        try:
            sha256 = self._proof.result()
        except NotTheFile:
            self.discard()
            raise
        os.replace(self.path, self._blob)
        return sha256

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def _follow(self) -> None:
        """In the thread of the hash: read what was written, which the system still has in memory."""
        buffer = memoryview(bytearray(PIECE))
        try:
            with self.path.open("rb", buffering=0) as file:
                while (end := self._ends.get()) is not None:
                    while self._proof.size < end and not self._given_up:
                        count = file.readinto(buffer[: end - self._proof.size])
                        if not count:
                            return
                        self._proof.update(buffer[:count])
        except OSError as error:
            self._error = error


def _taken(left: Path | None, path: Path, size: int) -> int:
    """Rename what an earlier pull left; returns its bytes, 0 when there is none or it is too long."""
    if left is None:
        return 0
    try:
        os.rename(left, path)
    except OSError:  # another pull was faster, or it is gone
        return 0
    found = os.lstat(path).st_size
    if found > size:
        path.unlink()
    return found if found <= size else 0


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
