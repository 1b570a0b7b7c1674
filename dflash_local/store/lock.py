"""Who is pulling, using or removing a repo (or writing results), shared between processes by small files in a folder.

``flock`` decides where it works; the owner's record (process, start, boot, host) where it is missing or lies, and where
a killed owner's lock outlives it. The worst that a wrong lock costs is traffic: files appear by rename alone.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from dflash_local.errors import BusyError, Interrupted
from dflash_local.settings import Settings
from dflash_local.store.atomic import FILE_MODE, make_private
from dflash_local.store.names import folder_name
from dflash_local.store.owner import Owner

if sys.platform != "win32":
    import fcntl

POLL_S = 0.1
GRACE_S = 1.0  # what a record may be behind its lock, and a lock behind its dead owner
FOREIGN_S = 86400.0  # how long another machine's session is believed to live
REMOVAL_S = 60.0  # the same for its removals, which are over in a moment
Purpose = Literal["pull", "remove", "measure"]
DOING = {"pull": "pulled or removed", "remove": "pulled or removed", "measure": "written"}


def folder_of(settings: Settings) -> Path | None:
    """Where lock files lie; None when there is no home folder, and then nothing is locked."""
    return settings.cache_dir / "locks" if settings.cache_dir else None


@contextmanager
def exclusive(
    folder: Path | None,
    repo: str,
    on_wait: Callable[[int | None], None] | None = None,
    *,
    purpose: Purpose = "pull",
    wait: bool = True,
    cancelled: Callable[[], bool] | None = None,
    title: str = "",
) -> Iterator[None]:
    """Hold the repo as its only puller, remover or (of a file of results) writer for the length of the block.

    Where no lock file can be written (no home, read-only home) the block runs without one.

    Args:
        on_wait: called once with the holder's process id (None: unknown) when there is one.
        wait: False raises at once instead of waiting. title: what errors call it instead of ``repo``.
        cancelled: polled while waiting.

    Raises:
        BusyError: held by another, and ``wait`` is False. Interrupted: cancelled while waiting.
    """
    lock = None if folder is None else _Lock(folder, repo, purpose)
    notified = False
    while lock is not None and not lock.take():
        if not wait:
            who = _who(lock.holder)
            raise BusyError(f"{title or repo} is being {DOING[purpose]} by {who}", "wait until it has finished")
        if not notified and on_wait is not None:
            on_wait(lock.holder.pid if lock.holder else None)
        notified = True
        if cancelled is not None and cancelled():
            raise Interrupted("interrupted while waiting for another dflash")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        if lock is not None:
            lock.give()


@contextmanager
def using(folder: Path | None, repo: str) -> Iterator[None]:
    """Note that this process has the repo loaded, so that no file of it is removed. BusyError: it is being removed."""
    path, descriptor = _noted(folder, repo)
    try:
        # After the note, so that a remover who came first sees it or is seen.
        remover = _remover(folder, repo)
        if remover is not None:
            raise BusyError(f"{repo} is being removed by {_who(remover)}", "pull it again afterwards")
        yield
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def users(folder: Path | None, repo: str) -> tuple[int, ...]:
    """The processes that have the repo loaded, this one included; notes of the dead are cleared away."""
    notes = sorted(folder.glob(f"{folder_name(repo)}.use.*.json")) if folder is not None and folder.is_dir() else []
    return tuple(sorted({pid for pid in map(_live_user, notes) if pid is not None}))


def held_by_another(path: Path) -> bool | None:
    """Whether somebody holds the ``flock`` of a file; None when this system cannot say. Creates nothing."""
    try:
        writable = os.access(path, os.W_OK)  # another user's need not be
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        taken = flock(descriptor)
    finally:
        os.close(descriptor)
    return None if taken is None else not taken


class _Lock:
    """One attempt after another at the lock of a repo; ``holder`` is who was in the way last."""

    def __init__(self, folder: Path, repo: str, purpose: Purpose) -> None:
        self.holder: Owner | None = None
        self._path = folder / f"{folder_name(repo)}.lock"
        self._record = folder / f"{folder_name(repo)}.owner.json"
        self._me = Owner.me(purpose)
        self._descriptor = -1
        self._dead_since: float | None = None

    def take(self) -> bool:
        """True when the lock is ours, or none can be kept here."""
        try:
            make_private(self._path.parent)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        except OSError:
            return True
        taken = flock(self._descriptor)
        self.holder = Owner.read(self._record)
        if taken is False:
            self._dethrone()
            return self._back_off()
        if taken and not _same_file(self._descriptor, self._path):
            return self._back_off()
        return self._sign() or self._back_off()

    def give(self) -> None:
        if self._descriptor < 0:
            return
        mine = Owner.read(self._record)
        if mine is not None and mine.token == self._me.token:
            with suppress(OSError):
                self._record.unlink()
        self._back_off()

    def _sign(self) -> bool:
        """Leave our record, unless a living owner's is there: then flock let two in, or is missing."""
        for _ in range(2):
            try:
                self._me.write_new(self._record)
                return True
            except FileExistsError:
                pass
            except OSError:
                return True
            self.holder = Owner.read(self._record)
            if self.holder is None:
                age = _age(self._record)
                if age == math.inf:  # given back just now, and perhaps taken by a third
                    continue
                if age < GRACE_S:  # being written
                    return False
            elif self.holder.state == "alive":
                return False
            with suppress(OSError):
                self._record.unlink()
        return False

    def _dethrone(self) -> None:
        """Move a lock out of the way that a killed owner's child or a lying file system still holds."""
        if self.holder is None or self.holder.state != "dead":
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > GRACE_S:
            with suppress(OSError):
                self._record.unlink()
                self._path.unlink()

    def _back_off(self) -> bool:
        os.close(self._descriptor)
        self._descriptor = -1
        return False


def flock(descriptor: int) -> bool | None:
    """Take the lock without waiting: True taken, False held by another, None not to be had here."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES) else None
    return True


def _noted(folder: Path | None, repo: str) -> tuple[Path | None, int]:
    """A note of this process's own, locked; nothing where none can be kept."""
    if folder is None:
        return None, -1
    me = Owner.me("use")
    path = folder / f"{folder_name(repo)}.use.{me.pid}-{me.token}.json"
    try:
        make_private(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except OSError:
        return None, -1
    flock(descriptor)
    with suppress(OSError):
        os.write(descriptor, me.encoded())
    return path, descriptor


def _live_user(path: Path) -> int | None:
    """The process a note is about; None, and the note deleted, when it is dead."""
    owner = Owner.read(path)
    held = held_by_another(path)
    if held is True or (owner is not None and owner.state == "alive"):
        return owner.pid if owner else _pid_in(path)
    if owner is None and _age(path) < GRACE_S:  # being written
        return _pid_in(path)
    # Of another machine, whose lock need not reach this one. No session lasts for ever.
    beyond = owner is not None and owner.state == "unknown" and (held is None or not owner.near)
    if owner is not None and beyond and _age(path) < FOREIGN_S:
        return owner.pid
    with suppress(OSError):
        path.unlink()
    return None


def _remover(folder: Path | None, repo: str) -> Owner | None:
    path = folder / f"{folder_name(repo)}.owner.json" if folder is not None else None
    owner = Owner.read(path) if path is not None else None
    if path is None or owner is None or owner.purpose != "remove":
        return None
    state = owner.state
    return owner if state == "alive" or (state == "unknown" and _age(path) < REMOVAL_S) else None


def _who(owner: Owner | None) -> str:
    return f"process {owner.pid}" if owner else "another process"


def _pid_in(path: Path) -> int | None:
    digits = path.name.rsplit(".use.", 1)[-1].split("-", 1)[0]
    return int(digits) if digits.isdecimal() else None


def _same_file(descriptor: int, path: Path) -> bool:
    """False when the file we locked has been moved out of the way in the meantime."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _age(path: Path) -> float:
    """Seconds since the file was written; for ever when it is gone. A file server's clock may be ahead."""
    try:
        return abs(time.time() - path.stat().st_mtime)
    except OSError:
        return math.inf
