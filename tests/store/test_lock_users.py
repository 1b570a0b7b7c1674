"""Sessions that use a repo, and the records that tell the living from the dead."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dflash_local.errors import BusyError
from dflash_local.store import lock, owner
from dflash_local.store.atomic import write_atomic
from dflash_local.store.owner import Owner
from tests.store.cache_trees import HOLD, REPO, gone_pid, process

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and flock")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "locks"


def record(folder: Path, **changes: object) -> Owner:
    """A puller's record left in the folder, changed from one of this process."""
    made = replace(Owner.me("pull"), **changes)  # type: ignore[arg-type]
    write_atomic(folder / "models--lab--Pair-8B.owner.json", made.encoded())
    return made


def test_many_may_use_a_repo_while_it_is_pulled(folder: Path) -> None:
    with process(HOLD, "use", folder, REPO) as first, process(HOLD, "use", folder, REPO) as second:
        with lock.exclusive(folder, REPO, wait=False), lock.using(folder, REPO):
            assert lock.users(folder, REPO) == tuple(sorted((first.pid, second.pid, os.getpid())))
            assert lock.users(folder, "lab/Other") == ()
    assert lock.users(folder, REPO) == ()


@posix
@pytest.mark.parametrize("mode", ["use", "use no flock", "use lying"])
def test_notes_of_killed_sessions_are_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    if mode != "use":
        monkeypatch.setattr(lock, "flock", lambda descriptor: None if "no flock" in mode else True)
    with process(HOLD, mode, folder, REPO) as session:
        assert lock.users(folder, REPO) == (session.pid,)
        session.kill()
        session.wait()
        assert lock.users(folder, REPO) == ()
        assert list(folder.iterdir()) == []


def note(folder: Path, age: float, **changes: object) -> Path:
    made = replace(Owner.me("use"), **changes)  # type: ignore[arg-type]
    path = folder / f"models--lab--Pair-8B.use.{made.pid}-{made.token}.json"
    write_atomic(path, made.encoded())
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_another_machine_s_session_is_believed_for_a_day(folder: Path) -> None:
    fresh = note(folder, 60.0, pid=4711, host="elsewhere", boot="other")
    old = note(folder, 2 * 86400.0, pid=4712, host="elsewhere", boot="other")
    assert lock.users(folder, REPO) == (4711,)
    assert fresh.exists() and not old.exists()


@posix
def test_a_container_s_session_is_judged_by_its_lock(folder: Path) -> None:
    """Under one kernel locks meet, so a free one means dead, whatever the container was called."""
    left = note(folder, 60.0, pid=1, host="c0ffee")
    assert lock.users(folder, REPO) == ()
    assert not left.exists()


def test_a_note_just_being_written_counts(folder: Path) -> None:
    path = folder / "models--lab--Pair-8B.use.4711-00.json"
    write_atomic(path, b"")
    assert lock.users(folder, REPO) == (4711,)
    os.utime(path, (1, 1))
    assert lock.users(folder, REPO) == ()


def test_nobody_begins_to_use_what_is_being_removed(folder: Path) -> None:
    with lock.exclusive(folder, REPO, purpose="remove"):
        with pytest.raises(BusyError, match=f"is being removed by process {os.getpid()}"):
            with lock.using(folder, REPO):
                pytest.fail("in use and being removed")
        assert lock.users(folder, REPO) == ()
    with lock.using(folder, REPO):
        assert lock.users(folder, REPO) == (os.getpid(),)


def test_a_removal_on_another_machine_is_not_believed_for_ever(folder: Path) -> None:
    record(folder, purpose="remove", host="elsewhere", boot="other")
    with pytest.raises(BusyError):
        with lock.using(folder, REPO):
            pytest.fail("in use and being removed")
    os.utime(folder / "models--lab--Pair-8B.owner.json", (1, 1))
    with lock.using(folder, REPO):
        assert lock.users(folder, REPO) == (os.getpid(),)


def test_a_record_says_when_boot_and_host_of_its_process(folder: Path) -> None:
    made = Owner.me("pull")
    assert (made.pid, made.host, made.purpose) == (os.getpid(), socket.gethostname(), "pull")
    assert made.state == "alive" and made.near and made.started and made.boot
    assert json.loads(made.encoded()) == asdict(made)
    assert replace(made, host="elsewhere").state == "unknown"
    if made.space:
        assert replace(made, space="pid:[1]").state == "unknown"


@linux
def test_off_linux_psutil_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path

    def without_proc(path: str) -> Path:
        return real(path.replace("/proc/", "/no-such-proc/"))

    monkeypatch.setattr(owner, "Path", without_proc)
    monkeypatch.setattr(owner, "_boot", owner._boot.__wrapped__)
    assert float(owner._boot()) > 1e9
    began = owner.started(os.getpid())
    assert began is not None and abs(float(began) - time.time()) < 86400
    assert owner.started(gone_pid()) is None
    assert Owner.me("pull").state == "alive"


def test_boot_times_read_off_a_clock_may_move_a_little() -> None:
    assert owner._same_boot("1700000000", "1700000007")
    assert not owner._same_boot("1700000000", "1700009000")
    assert owner._same_boot("0f-1", "0f-1") and not owner._same_boot("0f-1", "0f-2")
