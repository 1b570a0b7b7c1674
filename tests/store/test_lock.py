"""Two processes and one repo: who waits, who is believed to live, and what a lying lock may cost."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.errors import BusyError, Interrupted
from dflash_local.store import lock
from dflash_local.store.atomic import write_atomic
from dflash_local.store.owner import Owner
from tests.store.cache_trees import HOLD, REPO, gone_pid, process

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and flock")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "locks"


def no_flock(monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> None:
    monkeypatch.setattr(lock, "flock", lambda descriptor: answer)


def record(folder: Path, **changes: object) -> Owner:
    """A puller's record left in the folder, changed from one of this process."""
    made = replace(Owner.me("pull"), **changes)  # type: ignore[arg-type]
    write_atomic(folder / "models--lab--Pair-8B.owner.json", made.encoded())
    return made


class Polls:
    """Asked before each of a waiter's sleeps whether it is to go on: what it slept, however busy the machine is."""

    slept_s = 0.0

    def __call__(self) -> bool:
        self.slept_s += lock.POLL_S
        return False


def test_the_second_puller_waits_and_is_told_for_whom(folder: Path) -> None:
    waited: list[int | None] = []
    with process(HOLD, "pull", folder, REPO) as first:
        threading.Timer(0.3, lambda: first.stdin and first.stdin.close()).start()
        start = time.monotonic()
        with lock.exclusive(folder, REPO, waited.append):
            assert waited == [first.pid]
            assert time.monotonic() - start > 0.2
            assert not list(folder.glob("*.use.*"))


def test_without_a_rival_nobody_waits_and_little_is_left(folder: Path) -> None:
    waited: list[int | None] = []
    for _ in range(2):
        with lock.exclusive(folder, REPO, waited.append):
            pass
    assert waited == []
    assert [path.name for path in folder.iterdir()] == ["models--lab--Pair-8B.lock"]


def test_repos_do_not_wait_for_each_other(folder: Path) -> None:
    with lock.exclusive(folder, REPO), lock.exclusive(folder, "lab/Other", wait=False):
        assert len(list(folder.glob("*.owner.json"))) == 2


def test_threads_of_one_process_wait_too(folder: Path) -> None:
    seen: list[str] = []
    with lock.exclusive(folder, REPO):
        thread = threading.Thread(target=lambda: _note(folder, seen))
        thread.start()
        time.sleep(0.3)
        assert seen == []
    thread.join(5)
    assert seen == ["in"]


def _note(folder: Path, seen: list[str]) -> None:
    with lock.exclusive(folder, REPO):
        seen.append("in")


def test_not_waiting_is_refused_with_the_holder_named(folder: Path) -> None:
    with lock.exclusive(folder, REPO):
        with pytest.raises(BusyError, match=f"process {os.getpid()}"):
            with lock.exclusive(folder, REPO, wait=False):
                pytest.fail("two are in")


def test_waiting_can_be_cancelled(folder: Path) -> None:
    with lock.exclusive(folder, REPO), pytest.raises(Interrupted):
        with lock.exclusive(folder, REPO, cancelled=lambda: True):
            pytest.fail("two are in")


def test_the_lock_is_given_back_after_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="oops"), lock.exclusive(folder, REPO):
        raise ValueError("oops")
    with lock.exclusive(folder, REPO, wait=False):
        assert list(folder.glob("*.owner.json"))


@posix
@pytest.mark.parametrize("mode", ["pull", "pull no flock", "pull lying"])
def test_the_lock_of_a_killed_process_is_taken_over(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    if mode != "pull":
        no_flock(monkeypatch, None if "no flock" in mode else True)
    with process(HOLD, mode, folder, REPO) as first:
        with pytest.raises(BusyError, match=f"process {first.pid}"):
            with lock.exclusive(folder, REPO, wait=False):
                pytest.fail("two are in")
        polls = Polls()
        first.send_signal(signal.SIGKILL)  # not waited for: a process not yet buried is dead all the same
        with lock.exclusive(folder, REPO, cancelled=polls):
            assert polls.slept_s < 2.0
            now = Owner.read(folder / "models--lab--Pair-8B.owner.json")
            assert now is not None and now.pid == os.getpid()


@posix
def test_a_lock_that_outlives_its_dead_owner_is_taken_over(folder: Path) -> None:
    """A child that inherited the descriptor keeps the flock; the record tells that its taker is dead."""
    import fcntl

    record(folder, pid=gone_pid())
    path = folder / "models--lab--Pair-8B.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        polls = Polls()
        with lock.exclusive(folder, REPO, cancelled=polls):
            assert polls.slept_s < 2.0
            with pytest.raises(BusyError):
                with lock.exclusive(folder, REPO, wait=False):
                    pytest.fail("two are in")


@posix
def test_a_held_lock_without_a_record_is_respected(folder: Path) -> None:
    import fcntl

    folder.mkdir(parents=True)
    with (folder / "models--lab--Pair-8B.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process"):
            with lock.exclusive(folder, REPO, wait=False):
                pytest.fail("two are in")


@posix
def test_a_lock_file_that_was_moved_away_before_it_was_locked_is_no_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no record can be written, the file at the path is all that the next puller can meet."""

    def full(_self: Owner, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Owner, "write_new", full)
    path, flock = folder / "models--lab--Pair-8B.lock", lock.flock
    seen: list[int] = []

    def overtaken(descriptor: int) -> bool | None:
        if not seen:  # a third one dethrones a dead owner between our opening the file and locking it
            path.unlink()
        seen.append(descriptor)
        return flock(descriptor)

    monkeypatch.setattr(lock, "flock", overtaken)
    with lock.exclusive(folder, REPO):
        assert len(seen) == 2
        with pytest.raises(BusyError):
            with lock.exclusive(folder, REPO, wait=False):
                pytest.fail("two are in")


DEAD: list[Callable[[], dict[str, object]]] = [
    lambda: {"pid": gone_pid()},
    lambda: {"started": "1"},  # the id was given to a later process
    lambda: {"boot": "0f0f0f0f-0000-0000-0000-000000000000"},  # the machine was started anew
]


@pytest.mark.parametrize("changes", DEAD, ids=["pid", "start", "boot"])
@pytest.mark.parametrize("flock", [True, None])
def test_records_of_dead_processes_do_not_hold(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: Callable[[], dict[str, object]], flock: bool | None
) -> None:
    no_flock(monkeypatch, flock)
    assert record(folder, **changes()).state == "dead"
    with lock.exclusive(folder, REPO, wait=False):
        now = Owner.read(folder / "models--lab--Pair-8B.owner.json")
        assert now is not None and now.state == "alive"


@pytest.mark.parametrize("content", [b"", b"{", b"5", b'{"pid": "x"}', b"\xff" * 9000])
def test_a_record_that_makes_no_sense_holds_only_while_it_may_be_half_written(folder: Path, content: bytes) -> None:
    path = folder / "models--lab--Pair-8B.owner.json"
    write_atomic(path, content)
    with pytest.raises(BusyError):
        with lock.exclusive(folder, REPO, wait=False):
            pytest.fail("its writer may be in")
    os.utime(path, (1, 1))
    with lock.exclusive(folder, REPO, wait=False):
        assert Owner.read(path) is not None


@pytest.mark.parametrize("flock", [True, None])
def test_where_flock_lies_or_is_missing_a_living_owner_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flock: bool | None
) -> None:
    no_flock(monkeypatch, flock)
    with lock.exclusive(folder, REPO):
        with pytest.raises(BusyError, match=f"process {os.getpid()}"):
            with lock.exclusive(folder, REPO, wait=False):
                pytest.fail("two are in")


WRITER = """
import sys, time
from pathlib import Path
from dflash_local.store import lock, owner
from dflash_local.store.atomic import write_atomic
folder, target, letter = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
lock.flock = lambda descriptor: True
owner.Owner.state = property(lambda self: "dead")  # nor does the record hold anybody back
with lock.exclusive(folder, "lab/Pair-8B"):
    print("ready", flush=True)
    while not (target.parent / "go").exists():
        time.sleep(0.001)
    for turn in range(60):
        write_atomic(target, letter * 200_000)
"""


@posix
def test_two_writers_whom_no_lock_stops_leave_one_right_file(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "blob"
    with process(WRITER, folder, target, "a") as first, process(WRITER, folder, target, "b") as second:
        (tmp_path / "go").touch()  # both are inside the lock
        seen = set()
        while first.poll() is None or second.poll() is None:
            if target.exists():
                data = target.read_bytes()
                assert len(data) == 200_000
                seen |= set(data)
        assert first.returncode == second.returncode == 0
    assert target.read_bytes() in (b"a" * 200_000, b"b" * 200_000)
    assert seen == set(b"ab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blob", "cache", "go"]


def test_flock_that_the_file_system_does_not_offer_is_told_from_one_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    folder.mkdir(parents=True)
    (folder / "x").touch()
    answers = []
    for number in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EWOULDBLOCK, errno.EACCES):

        def fail(descriptor: int, flags: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", fail)
        answers.append(lock.held_by_another(folder / "x"))
    assert answers == [None, None, None, True, True]
    assert lock.held_by_another(folder / "none") is False


def test_another_machine_s_record_does_not_stop_a_pull(folder: Path) -> None:
    assert record(folder, host="elsewhere", boot="other").state == "unknown"
    with lock.exclusive(folder, REPO, wait=False):
        now = Owner.read(folder / "models--lab--Pair-8B.owner.json")
        assert now is not None and now.pid == os.getpid()


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
if sys.argv[1] != "None":
    lock.flock = lambda descriptor: None
print("ready", flush=True)
sys.stdin.readline()
for turn in range(40):
    with lock.exclusive(Path(sys.argv[2]), "lab/Pair-8B"):
        number = int(Path(sys.argv[3]).read_text())
        Path(sys.argv[3]).write_text(str(number + 1))
"""


@posix
@pytest.mark.parametrize("without", [None, "flock"])
def test_never_are_two_in(folder: Path, tmp_path: Path, without: str | None) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    with process(COUNT, without, folder, counter) as one, process(COUNT, without, folder, counter) as two:
        for child in (one, two):
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert one.wait(30) == two.wait(30) == 0
    assert counter.read_text() == "80"


def test_locks_lie_in_the_cache_folder(tmp_path: Path) -> None:
    assert lock.folder_of(settings.load({"DFLASH_HOME": str(tmp_path)})) == tmp_path / "cache" / "locks"
    assert lock.folder_of(settings.load({})) is None
