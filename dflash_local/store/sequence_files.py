"""Sequences kept on disk, a file each, which is found whole or not at all. What a body holds, its writer knows.

A file is a prefix (a mark, the digest of the head, its size), the head in JSON and the body, whose digest the head has:
no byte of it can change unseen. That is a digest of the digests of its parts, which several threads make:
one core takes longer for it than a disk for the bytes. Several programs may use one folder.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from dflash_local.json_text import parse_json
from dflash_local.store.kept import keep

SUFFIX = ".sequence"
MARK = b"dflash 2"  # with the version of this layout
PART = 2**25  # bytes of a body with a digest of their own
READERS = 4  # threads that check them
STALE_S = 600.0  # a file that is being written is written to more often than this
WRONG = (ValueError, TypeError, struct.error)  # what reading something else as a sequence raises
_PREFIX = struct.Struct("<8s32sQ")  # mark, digest of the head, bytes of the head
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """What a file's head says.

    Attributes:
        ids: its tokens. lengths: those that it can be gone back to. content: as its writer gave it.
        nbytes, digest: of the body, see ``_digest``.
    """

    path: Path
    ids: list[int]
    lengths: list[int]
    content: Mapping[str, Any]
    nbytes: int
    digest: str


class SequenceFiles:
    """The sequences of one folder in ``root``.

    Args:
        key: names the folder: a digest of all that the bytes of a body depend on besides its ids.
        most_bytes: of all files in all folders of ``root``.
    """

    def __init__(self, root: Path, key: str, most_bytes: int) -> None:
        self.root, self.folder, self.most_bytes = root, root / key, most_bytes
        self._known: dict[tuple[str, int, int], StoredSequence] = {}

    def stored(self) -> list[StoredSequence]:
        """List what is there now. Only heads are read, each once; a file with a wrong one is deleted."""
        found = {}
        for path, stat in _files(self.folder, SUFFIX):
            key = path.name, stat.st_ino, stat.st_size
            known = self._known.get(key) or _read_head(path)
            if known is not None:
                found[key] = known
        self._known = found
        return list(found.values())

    def read(self, stored: StoredSequence) -> tuple[StoredSequence, mmap] | None:
        """Return a sequence with its body, as they are now; None where it has vanished. A damaged one is deleted."""
        try:
            with stored.path.open("rb") as file:
                now = _head_of(file, stored.path)
                body = _read_body(file, now)
                os.utime(stored.path)  # it was used
        except OSError:
            return None
        except WRONG:
            self.refuse(stored)
            return None
        return now, body

    def refuse(self, stored: StoredSequence) -> None:
        """Delete one that is of no use."""
        _refuse(stored.path)

    def write(
        self, ids: Sequence[int], lengths: Sequence[int], content: Mapping[str, Any], body: Sequence[memoryview]
    ) -> None:
        """Keep a sequence; those that are beginnings of it go, and then the oldest of all there is no room for."""
        ids, size = list(ids), sum(piece.nbytes for piece in body)
        digest = _digest(_part_digests(body))
        fields = {"lengths": list(lengths), "content": content, "nbytes": size, "digest": digest}
        head = json.dumps({"ids": ids, **fields}).encode()
        prefix = _PREFIX.pack(MARK, sha256(head).digest(), len(head))
        path = self.folder / f"{sha256(json.dumps(ids).encode()).hexdigest()[:32]}{SUFFIX}"
        whole = len(prefix) + len(head) + size
        if whole > self.most_bytes:
            return
        self._make_room(whole, path)
        if keep(path, (prefix, head, *body)):
            for other in self.stored():
                if other.path != path and other.ids == ids[: len(other.ids)]:
                    _delete(other.path)

    def _make_room(self, size: int, path: Path) -> None:
        """Delete the oldest files until another one of so many bytes fits, in the place of ``path``."""
        files = [each for folder in _folders(self.root) for each in _files(folder, SUFFIX) if each[0] != path]
        left = sum(stat.st_size for _, stat in files) + size
        for old, stat in sorted(files, key=lambda each: each[1].st_mtime_ns):
            if left <= self.most_bytes:
                break
            _delete(old)
            left -= stat.st_size
        for folder in _folders(self.root):
            for part, stat in _files(folder, ".tmp"):  # of a program that was killed
                if time.time() - stat.st_mtime > STALE_S:
                    _delete(part)


def _read_head(path: Path) -> StoredSequence | None:
    try:
        with path.open("rb") as file:
            return _head_of(file, path)
    except OSError:  # it has vanished, or cannot be read now
        return None
    except WRONG:
        _refuse(path)
        return None


def _head_of(file: BinaryIO, path: Path) -> StoredSequence:
    """Read the head; the body is next. Raises WRONG: it is none, or the file has another size than it says."""
    whole = os.fstat(file.fileno()).st_size
    mark, digest, size = _PREFIX.unpack(file.read(_PREFIX.size))
    head = file.read(min(size, whole))
    if mark != MARK or sha256(head).digest() != digest:
        raise ValueError("no head")
    found = StoredSequence(path, **parse_json(head))
    if _PREFIX.size + size + found.nbytes != whole:
        raise ValueError("cut off")
    return found


def _read_body(file: BinaryIO, stored: StoredSequence) -> mmap:
    """Read what is behind the head. Raises ValueError: it is another body than the head's."""
    start, body = file.tell(), mmap(-1, max(stored.nbytes, 1))  # a bytearray would first be filled with zeros
    reading = Lock()

    def read(at: int) -> bytes:
        part = memoryview(body)[at : min(at + PART, stored.nbytes)]
        with reading:
            file.seek(start + at)
            file.readinto(part)  # type: ignore[attr-defined]
        return sha256(part).digest()

    with ThreadPoolExecutor(READERS) as pool:
        digests = list(pool.map(read, range(0, stored.nbytes, PART)))
    if _digest(digests) != stored.digest:
        raise ValueError("another body")
    return body


def _part_digests(body: Iterable[memoryview]) -> Iterator[bytes]:
    digest, room = sha256(), PART
    for piece in body:
        while piece:
            digest.update(piece[:room])
            piece, room = piece[room:], room - len(piece[:room])
            if room == 0:
                yield digest.digest()
                digest, room = sha256(), PART
    if room < PART:
        yield digest.digest()


def _digest(digests: Iterable[bytes]) -> str:
    """Return the digest of a body's parts of ``PART`` bytes, of which the last may be shorter."""
    return sha256(b"".join(digests)).hexdigest()


def _refuse(path: Path) -> None:
    _LOGGER.warning("%s is damaged, or of another version: it was deleted", path)
    _delete(path)


def _folders(root: Path) -> list[Path]:
    with suppress(OSError), os.scandir(root) as found:
        return [Path(each.path) for each in found if each.is_dir(follow_symlinks=False)]
    return []


def _files(folder: Path, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        with os.scandir(folder) as found:
            entries = [each for each in found if each.name.endswith(suffix)]
    except OSError:
        return
    for each in entries:
        with suppress(OSError):  # another program deleted it
            yield Path(each.path), each.stat(follow_symlinks=False)


def _delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
