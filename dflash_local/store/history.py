"""Chats on disk: a file each, appended by one writer at a time. Whatever happens to the file, the chat goes on."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_local.errors import BusyError, DFlashError, UsageError
from dflash_local.store.atomic import FILE_MODE, make_private, write_atomic
from dflash_local.store.paths import CHAT_SUFFIX, chat_path, is_chat_name
from dflash_local.store.records import Chat, Turn, decode, encode, encode_chat, encode_turn, outline

if sys.platform != "win32":
    import fcntl

BAD_SUFFIX = ".bad"
_NUMBERED = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")  # a name that nobody chose


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One chat of a list.

    Attributes:
        name: what ``load`` takes. title: given by the user, else the first words; never empty.
        model: that it was talked to last. turns: messages and replies.
        modified: seconds since the epoch. size: bytes.
    """

    name: str
    title: str
    model: str
    turns: int
    modified: float
    size: int


class ChatFile:
    """Describes appends to an open chat that no other process appends to."""

    def __init__(self, path: Path, descriptor: int, seq: int) -> None:
        self.path, self._descriptor, self._seq = path, descriptor, seq

    @classmethod
    def create(cls, folder: Path, model: str, system: str, turns: Sequence[Turn] = ()) -> ChatFile:
        """Return create a file with the turns so far. Raises OSError: no permission, disk full."""
        make_private(folder)
        path = chat_path(folder, f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        chat = cls(path, os.open(path, flags, FILE_MODE), len(turns) + 1)
        _flock(chat._descriptor)  # the name is ours alone already
        try:
            chat._write(encode_chat(model, system, turns))
        except OSError:
            chat.close()
            path.unlink(missing_ok=True)
            raise
        return chat

    @classmethod
    def resume(cls, path: Path) -> tuple[ChatFile, Chat]:
        """Open a chat to go on with it; a line cut by a crash is moved to a ``.bad`` file, and what had come of a reply
        by then becomes a turn that was stopped.

        Raises:
            BusyError: another process has it open. UsageError: a newer version wrote it.
            OSError: it cannot be read or written.
        """
        with ExitStack() as stack:
            descriptor = _opened(path, os.O_RDWR | os.O_APPEND)
            stack.callback(os.close, descriptor)
            # On Windows, which has no such lock, no chat is appended to by a second program: it goes on in a new file.
            if not _flock(descriptor):
                raise BusyError(f"{path.stem} is open in another dflash", "this chat goes on in a file of its own")
            raw = _read(descriptor)
            chat = decode(raw)
            if chat.newer:
                newer = f"{path.stem} was written by a newer version of dflash-local and is only read"
                raise UsageError(newer, "this chat goes on in a file of its own")
            if len(raw) > chat.good_bytes:
                bad = os.open(path.with_name(path.name + BAD_SUFFIX), os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
                with os.fdopen(bad, "wb") as file:
                    file.write(raw[chat.good_bytes :] + b"\n")
                os.ftruncate(descriptor, chat.good_bytes)
            elif raw and not raw.endswith(b"\n"):
                os.write(descriptor, b"\n")
            resumed = cls(path, descriptor, chat.last_seq + 1)
            if chat.unfinished:
                resumed.turn(chat.turns[-1])
            stack.pop_all()
        return resumed, chat

    def turn(self, turn: Turn) -> None:
        """Append a turn; it is on the disk when this returns."""
        self._append(encode_turn(self._seq, turn))

    def record(self, kind: str, **fields: Any) -> None:
        """Append another record: ``system``, ``model`` or ``title`` (content), ``summary`` (count, content),
        ``drop`` (count), or ``part`` of a reply under way (content, thinking).
        """
        self._append(encode(kind, self._seq, **fields))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            self._write(line)
        except OSError:
            os.ftruncate(self._descriptor, size)  # no half line where the disk was full
            raise
        self._seq += 1

    def _write(self, raw: bytes) -> None:
        view = memoryview(raw)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)


class Recorder:
    """Keeps a chat on disk as long as it can; the first failure is one warning and the last try.

    The file begins with the first turn, so that opening and leaving a chat leaves nothing.

    Args:
        folder: where chats are kept; None when there is no home folder.
        warn: shows one line. keep: False records nothing and says nothing.
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None], keep: bool = True) -> None:
        self._folder, self._warn, self._keep = folder, warn, keep
        self._file: ChatFile | None = None
        self._model = ""  # that the file names last

    @property
    def name(self) -> str | None:
        """Return the chat's name once it has a file."""
        return self._file.path.stem if self._file else None

    @property
    def path(self) -> Path | None:
        """Return the chat's file once it has one."""
        return self._file.path if self._file else None

    def turn(self, model: str, system: str, turns: Sequence[Turn]) -> None:
        """Record the last of ``turns``, and all of them when the file begins here."""
        if not self._keep:
            return
        try:
            if self._file is not None:
                if model != self._model:
                    self._file.record("model", content=model)
                self._file.turn(turns[-1])
            elif self._folder is None:
                raise OSError("there is no home folder (HOME is not set)")
            else:
                self._file = ChatFile.create(self._folder, model, system, turns)
            self._model = model
        except OSError as error:
            self._stop(error)

    def record(self, kind: str, **fields: Any) -> None:
        """Record something that happened to an existing file; nothing without one."""
        if self._file is not None:
            try:
                self._file.record(kind, **fields)
            except OSError as error:
                self._stop(error)

    def go_on(self, path: Path) -> None:
        """Append to an existing chat from now on; where that is impossible, warn and begin anew."""
        self.begin_anew()
        if not self._keep:
            return
        try:
            self._file, chat = ChatFile.resume(path)
            self._model = chat.model
        except DFlashError as error:
            self._warn(str(error))
        except OSError as error:
            self._stop(error)

    def begin_anew(self) -> None:
        """Let the next turn begin a new file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    close = begin_anew

    def _stop(self, error: OSError) -> None:
        self._keep = False
        self.begin_anew()
        self._warn(f"this chat is not kept any more: {error.strerror or error}")


def load(folder: Path | None, name: str) -> tuple[Path, Chat]:
    """Load a chat by its name. UsageError: there is none of that name. DFlashError: it cannot be read."""
    path = chat_path(folder, name) if folder else None
    try:
        if path is None:
            raise FileNotFoundError
        return path, decode(_whole(path))
    except FileNotFoundError as error:
        raise UsageError(f"there is no chat {name!r}", "/load and dflash chat --resume list them") from error
    except OSError as error:
        raise DFlashError(f"{path} cannot be read: {error.strerror}") from error


def save(folder: Path | None, name: str, chat: bytes, replace: bool) -> Path:
    """Write a whole chat (``records.encode_chat``). UsageError: a bad or taken name. DFlashError: unwritable."""
    if folder is None:
        raise DFlashError("there is no home folder to save in", "set HOME or DFLASH_HOME")
    path = chat_path(folder, name)
    if path.exists() and not replace:
        raise UsageError(f"there is a chat {name!r} already", "choose another name")
    try:
        write_atomic(path, chat)
    except OSError as error:
        failed = f"{path} cannot be written: {error.strerror}"
        raise DFlashError(failed, "free some space or set DFLASH_HOME") from error
    return path


def entries(folder: Path | None, search: str = "") -> list[ChatEntry]:
    """List the chats, the newest first; a file that is no chat is passed over.

    Args:
        search: only chats with these words in their title or in a message, in capitals or not.

    Raises:
        DFlashError: the folder cannot be read.
    """
    found = []
    for path, status in _files(folder):
        with suppress(OSError):
            entry = _entry(path, status.st_mtime, status.st_size)
            if entry is not None and (search.casefold() in entry.title.casefold() or _has(path, search)):
                found.append(entry)
    return found


@lru_cache(maxsize=4096)
def _entry(path: Path, modified: float, size: int) -> ChatEntry | None:
    """Read a chat for the list, once while its file stays the same, as lists are drawn often; None for another file."""
    seen = outline(_whole(path))
    if seen is None:
        return None
    title = seen.title or (seen.words if _NUMBERED.fullmatch(path.stem) else "") or path.stem
    return ChatEntry(path.stem, title, seen.model, seen.turns, modified, size)


def _has(path: Path, search: str) -> bool:
    """Look for words in a chat's messages."""
    seen = outline(_whole(path))
    return seen is not None and seen.has(search)


def find(folder: Path | None, wanted: str) -> ChatEntry:
    """Return the chat of a name, else the newest one whose title begins so. UsageError: there is none."""
    listed = entries(folder)
    begins = wanted.casefold().strip()
    named = [entry for entry in listed if entry.name == wanted]
    titled = [entry for entry in listed if entry.title.casefold().startswith(begins)]
    if not [*named, *titled]:
        raise UsageError(f"there is no chat {wanted!r}", "/load and dflash chat --resume list them")
    return [*named, *titled][0]


def rename(folder: Path | None, name: str, title: str) -> None:
    """Give a chat a title, also while it is open; its age stays.

    Raises:
        UsageError: there is none of that name, or a newer version wrote it. DFlashError: it cannot be written.
    """
    path, chat = load(folder, name)
    if chat.newer:
        raise UsageError(f"{name} was written by a newer version of dflash-local", "rename it there")
    line = encode("title", chat.last_seq + 1, content=" ".join(title.split()))
    try:
        status, ended = path.stat(), _whole(path).endswith(b"\n")
        descriptor = _opened(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line if ended else b"\n" + line)
        finally:
            os.close(descriptor)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    except OSError as error:
        raise DFlashError(f"{path} cannot be written: {error.strerror}") from error


def delete(folder: Path | None, name: str) -> None:
    """Remove a chat for good.

    Raises:
        BusyError: it is open. UsageError: there is none of that name. DFlashError: it cannot be removed.
    """
    path, _ = load(folder, name)
    try:
        descriptor = _opened(path, os.O_RDWR)
        try:
            if sys.platform != "win32" and not _flock(descriptor):  # Windows removes no open file
                raise BusyError(f"{name} is open in another chat", "close it there first")
        finally:
            os.close(descriptor)
        path.unlink()
        path.with_name(path.name + BAD_SUFFIX).unlink(missing_ok=True)
    except OSError as error:
        raise DFlashError(f"{path} cannot be removed: {error.strerror}") from error


def _files(folder: Path | None) -> list[tuple[Path, os.stat_result]]:
    """Return the files of chats, the newest first. DFlashError: the folder cannot be read."""
    if folder is None:
        return []
    try:
        paths = [path for path in folder.iterdir() if path.suffix == CHAT_SUFFIX and is_chat_name(path.stem)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DFlashError(f"{folder} cannot be read: {error.strerror}") from error
    found = []
    for path in paths:
        with suppress(OSError):  # a link that leads nowhere
            status = path.stat()
            found += [(path, status)] if stat.S_ISREG(status.st_mode) else []
    return sorted(found, key=lambda one: (one[1].st_mtime, one[0].stem), reverse=True)


def _whole(path: Path) -> bytes:
    descriptor = _opened(path, os.O_RDONLY)
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool:
    """Lock an open file without waiting; False where another has it, or the system has no such lock."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _opened(path: Path, flags: int) -> int:
    """Open a regular file; OSError for anything else. A pipe in its place is not waited for."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file")
    return descriptor


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()
