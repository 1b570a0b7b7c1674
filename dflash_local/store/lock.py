"""Who is pulling, using or removing a repo, loading a pair, or writing results: small files that processes share.

``filelock`` decides; a record beside a lock names its holder. The worst that a wrong lock costs is traffic, or a second
load: files appear by rename alone. Where no lock can be kept (no home, a read-only one), everything runs without.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash_local.errors import BusyError, Interrupted
from dflash_local.settings import Settings
from dflash_local.store.atomic import FILE_MODE, make_private
from dflash_local.store.names import folder_name

if TYPE_CHECKING:
    from filelock import BaseFileLock

POLL_S = 0.1
GRACE_S = 1.0  # how long a lock file may exist before its process has locked it
Purpose = Literal["pull", "remove", "measure", "load"]
DOING = {"pull": "pulled or removed", "remove": "pulled or removed", "measure": "written"}


def folder_of(settings: Settings) -> Path | None:
    """Return where lock files lie; None when there is no home folder, and then nothing is locked."""
    return settings.cache_dir / "locks" if settings.cache_dir else None


@contextmanager
def exclusive(
    folder: Path | None,
    repo: str,
    on_wait: Callable[[int | None], None] | None = None,
    *,
    purpose: Purpose = "pull",
    wait: bool = True,
    cancelled: Callable[[], bool] = lambda: False,
    title: str = "",
) -> Iterator[None]:
    """Lock the repo for its only puller or remover, a file of results for its writer, a pair for who loads it.

    Args:
        on_wait: called once with the holder's process id (None: unknown) when there is one.
        wait: False raises at once instead of waiting. title: what errors call it instead of ``repo``.
        cancelled: polled while waiting.

    Raises:
        BusyError: locked by another, and ``wait`` is False. Interrupted: cancelled while waiting.
    """
    lock = None if folder is None else _lock(folder / f"{folder_name(repo)}.lock")
    record = None if folder is None else _record(folder, repo)
    notified = False
    while lock is not None and (taken := _take(lock, POLL_S / 2)) is not True:
        if taken is None:
            lock = None
            break
        pid, _ = _holder(record)
        if not wait:
            who = "another process" if pid is None else f"process {pid}"
            raise BusyError(f"{title or repo} is being {DOING[purpose]} by {who}", "wait until it has finished")
        if not notified and on_wait is not None:
            on_wait(pid)
        notified = True
        if cancelled():
            raise Interrupted("interrupted while waiting for another dflash")
        time.sleep(POLL_S)
    try:
        if lock is not None and record is not None:
            with suppress(OSError):
                record.write_text(f"{os.getpid()} {purpose}", encoding="ascii")
        yield
    finally:
        if lock is not None and record is not None:
            with suppress(OSError):
                record.unlink()
            lock.release()


@contextmanager
def using(folder: Path | None, repo: str) -> Iterator[None]:
    """Note that this process has the repo loaded, so that no file of it is removed. BusyError: it is being removed."""
    path = None if folder is None else folder / f"{_users_of(repo)}{os.getpid()}-{secrets.token_hex(4)}"
    note = None if path is None else _lock(path)
    taken = note is not None and _take(note, GRACE_S)
    try:
        # After the note, so that a remover who came first sees it or is seen.
        pid, purpose = _holder(None if folder is None else _record(folder, repo))
        if folder is not None and purpose == "remove" and is_locked(folder / f"{folder_name(repo)}.lock"):
            raise BusyError(f"{repo} is being removed by process {pid}", "pull it again afterwards")
        yield
    finally:
        if note is not None and path is not None:
            if taken:
                note.release()
            with suppress(OSError):
                path.unlink()


def users(folder: Path | None, repo: str) -> tuple[int, ...]:
    """Return the processes that have the repo loaded, this one included; notes of the dead are cleared away."""
    found = set()
    for path in folder.glob(f"{_users_of(repo)}*") if folder is not None else ():
        if is_locked(path):
            found.add(int(path.name.rpartition(".")[2].partition("-")[0]))
            continue
        with suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > GRACE_S:
                path.unlink()
    return tuple(sorted(found))


def is_locked(path: Path) -> bool | None:
    """Return whether some program, this one included, holds a lock file; None where that cannot be said."""
    if not path.exists():
        return False
    lock = _lock(path)
    taken = _take(lock)
    if taken:
        lock.release()
    return None if taken is None else not taken


def _lock(path: Path) -> BaseFileLock:
    from filelock import FileLock

    return FileLock(path, mode=FILE_MODE)


def _take(lock: BaseFileLock, timeout_s: float = 0.0) -> bool | None:
    """Try to take a lock, for a moment, since somebody may just look at it; None where none can be kept."""
    from filelock import Timeout

    try:
        make_private(Path(lock.lock_file).parent)
        lock.acquire(timeout=timeout_s, poll_interval=POLL_S / 4)
    except Timeout:
        return False
    except (OSError, NotImplementedError):
        return None
    return True


def _record(folder: Path, repo: str) -> Path:
    return folder / f"{folder_name(repo)}.owner"


def _users_of(repo: str) -> str:
    return f"{folder_name(repo)}.use."


def _holder(record: Path | None) -> tuple[int | None, str]:
    """Return the process and the purpose that a record names; it may be one that a killed process left."""
    try:
        pid, purpose = record.read_text(encoding="ascii").split() if record is not None else ("", "")
        return int(pid), purpose
    except (OSError, ValueError):
        return None, ""
