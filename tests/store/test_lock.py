"""Two processes and one repo: who waits, who is told, and who uses what another would remove."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.errors import BusyError, Interrupted
from dflash_local.store import lock, owner
from dflash_local.store.owner import Owner
from tests.store.cache_trees import HOLD, REPO, gone_pid, process

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "locks"


def test_the_second_puller_waits_and_is_told_for_whom(folder: Path) -> None:
    waited: list[int | None] = []
    with process(HOLD, "pull", folder, REPO) as first:
        told = f"is being pulled or removed by process {first.pid}"
        with pytest.raises(BusyError, match=told), lock.exclusive(folder, REPO, wait=False):
            pytest.fail("two are in")
        threading.Timer(0.3, lambda: first.stdin and first.stdin.close()).start()
        start = time.monotonic()
        with lock.exclusive(folder, REPO, waited.append):
            assert waited == [first.pid] and time.monotonic() - start > 0.2


def test_without_a_rival_nobody_waits_and_little_is_left(folder: Path) -> None:
    waited: list[int | None] = []
    with pytest.raises(ValueError, match="oops"), lock.exclusive(folder, REPO):
        raise ValueError("oops")
    with lock.exclusive(folder, REPO, waited.append), lock.exclusive(folder, "lab/Other", wait=False):
        pass
    assert waited == []
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".lock"]


def test_threads_of_one_process_wait_too(folder: Path) -> None:
    seen: list[str] = []

    def note() -> None:
        with lock.exclusive(folder, REPO):
            seen.append("in")

    with lock.exclusive(folder, REPO):
        thread = threading.Thread(target=note)
        thread.start()
        time.sleep(0.1)
        assert seen == []
        with pytest.raises(Interrupted), lock.exclusive(folder, REPO, cancelled=lambda: True):
            pytest.fail("two are in")
    thread.join(60)
    assert seen == ["in"]


@posix
def test_the_lock_of_a_killed_process_is_free_and_its_record_means_nothing(folder: Path) -> None:
    with process(HOLD, "remove", folder, REPO) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert list(folder.glob("*.owner"))
    with lock.using(folder, REPO), lock.exclusive(folder, REPO, wait=False):
        assert lock.users(folder, REPO) == (os.getpid(),)


def test_a_lock_without_a_record_is_respected(folder: Path) -> None:
    with process(HOLD, "pull", folder, REPO):
        for path in folder.glob("*.owner"):
            path.write_bytes(b"\xff nonsense")
        with pytest.raises(BusyError, match="another process"), lock.exclusive(folder, REPO, wait=False):
            pytest.fail("two are in")


def test_without_a_writable_place_there_is_no_lock_and_no_failure(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for folder in (None, blocked / "locks"):
        with lock.exclusive(folder, REPO), lock.exclusive(folder, REPO, wait=False), lock.using(folder, REPO):
            assert lock.users(folder, REPO) == ()
    assert blocked.read_text() == "not a folder"


COUNT = """
import sys
from pathlib import Path
from dflash_local.store import lock
lock.POLL_S = 0.001
print("ready", flush=True)
sys.stdin.readline()
for turn in range(40):
    with lock.exclusive(Path(sys.argv[1]), "lab/Pair-8B"):
        number = int(Path(sys.argv[2]).read_text())
        Path(sys.argv[2]).write_text(str(number + 1))
"""


def test_never_are_two_in(folder: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    with process(COUNT, folder, counter) as one, process(COUNT, folder, counter) as two:
        for child in (one, two):
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert one.wait(30) == two.wait(30) == 0
    assert counter.read_text() == "80"


def test_many_may_use_a_repo_while_it_is_pulled(folder: Path) -> None:
    with process(HOLD, "use", folder, REPO) as first, process(HOLD, "use", folder, REPO) as second:
        with lock.exclusive(folder, REPO, wait=False), lock.using(folder, REPO):
            assert lock.users(folder, REPO) == tuple(sorted((first.pid, second.pid, os.getpid())))
            assert lock.users(folder, "lab/Other") == ()
    assert lock.users(folder, REPO) == ()


@posix
def test_notes_of_killed_sessions_are_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with process(HOLD, "use", folder, REPO) as session:
        assert lock.users(folder, REPO) == (session.pid,)
        session.kill()
        session.wait()
        monkeypatch.setattr(lock, "GRACE_S", 0.0)
        assert lock.users(folder, REPO) == () and list(folder.iterdir()) == []


def test_nobody_begins_to_use_what_is_being_removed(folder: Path) -> None:
    with lock.exclusive(folder, REPO, purpose="remove"):
        with pytest.raises(BusyError, match=f"is being removed by process {os.getpid()}"):
            with lock.using(folder, REPO):
                pytest.fail("in use and being removed")
        assert lock.users(folder, REPO) == ()
    with lock.using(folder, REPO):
        assert lock.users(folder, REPO) == (os.getpid(),)


def test_a_record_tells_the_living_from_the_dead_and_from_those_out_of_sight() -> None:
    made = Owner.me("pull")
    assert (made.pid, made.host, made.purpose, made.state) == (os.getpid(), socket.gethostname(), "pull", "alive")
    assert replace(made, pid=gone_pid()).state == "dead"
    assert replace(made, started=made.started - 3600).state == "dead", "a later process has its id"
    assert replace(made, host="elsewhere").state == replace(made, space="pid:[1]").state == "unknown"
    assert owner.started(gone_pid()) is None
