"""The child process: its limits hold, whatever ends it is one typed error, and nothing of it stays behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_local.errors import Interrupted, MissingDependencyError
from dflash_local.worker.process import ChildLimits, WorkerError, WorkerProcess

HANDLER = """
import json, os, threading
count = 0
def answer(request):
    global count
    count += 1
    word, _, rest = request.partition(b" ")
    if word == b"count":
        return str(count).encode()
    if word == b"sleep":
        threading.Event().wait()
    if word == b"rest":
        threading.Event().wait(0.3)
        return b"rested"
    while word == b"spin":
        pass
    if word == b"wait":
        print(end="", file=open(rest, "a"))
        while not os.path.exists(rest + b".go"):
            threading.Event().wait(0.01)
    if word == b"die":
        os._exit(3)
    if word == b"take":
        return str(len(bytearray(int(rest)))).encode()
    if word == b"write":
        with open(rest, "wb") as file:
            file.write(b"x")
    if word == b"environ":
        return json.dumps(sorted(os.environ)).encode()
    return request
"""
LIMITS = ChildLimits(30, 512)
POSIX = pytest.mark.skipif(os.name != "posix", reason="Windows has no such limits")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to a limit of address space")


@pytest.fixture
def worker(tmp_path: Path) -> WorkerProcess:
    path = tmp_path / "handler.py"
    path.write_text(HANDLER)
    return WorkerProcess(path, (), setup=b"hello", setup_limits=LIMITS)


def answers(worker: WorkerProcess) -> bool:
    return worker.request(b"echo", LIMITS) == b"echo"


def test_requests_are_answered_by_one_child_after_the_setup(worker: WorkerProcess) -> None:
    worker.begin()
    assert worker.greeting() == b"hello"
    first = worker.pid
    assert [worker.request(b"count", LIMITS) for _ in range(2)] == [b"2", b"3"]
    assert worker.pid == first
    worker.close()
    assert worker.pid is None and worker.request(b"count", LIMITS) == b"2"


def test_a_late_child_is_killed_and_replaced(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerError) as caught:
        worker.request(b"sleep", ChildLimits(0.1, 512))
    assert caught.value.late and worker.pid is None and answers(worker)


@POSIX
def test_processor_time_ends_a_child_and_waiting_does_not_count(worker: WorkerProcess) -> None:
    """However long others keep the processor from it, and however often it is asked."""
    limits = ChildLimits(30, 512, 0.2)
    for _ in range(2):
        assert worker.request(b"rest", limits) == b"rested"
    with pytest.raises(WorkerError) as caught:
        worker.request(b"spin", limits)
    assert caught.value.late and worker.pid is None and answers(worker)


def test_a_child_that_dies_of_a_request_is_not_given_it_twice(worker: WorkerProcess) -> None:
    assert answers(worker)
    with pytest.raises(WorkerError) as caught:
        worker.request(b"die", LIMITS)
    assert not caught.value.late and worker.pid is None and answers(worker)


@POSIX
def test_a_child_that_the_system_ended_is_replaced_unseen(worker: WorkerProcess) -> None:
    assert answers(worker)
    (child,) = worker._children
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until it is gone, which its owner has not seen yet
    assert answers(worker)


@POSIX
def test_a_request_whose_child_is_killed_at_work_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(HANDLER)
    worker = WorkerProcess(tmp_path / "handler.py", (), writes=True)
    place = tmp_path / "begun"
    answered: list[bytes] = []
    request = b"wait " + os.fsencode(place)
    thread = threading.Thread(target=lambda: answered.append(worker.request(request, LIMITS)), daemon=True)
    thread.start()
    while not place.exists():
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    place.with_suffix(".go").touch()
    thread.join(60)
    assert answered == [request]


@POSIX
def test_a_child_that_ends_before_it_has_all_of_a_request_is_replaced_unseen(tmp_path: Path) -> None:
    place, path = tmp_path / "ended", tmp_path / "handler.py"
    ends = f"""
import sys, types
read = sys.stdin.buffer.read
def once(size):
    if size > 2**16 and not os.path.exists({str(place)!r}):
        open({str(place)!r}, "w")
        os._exit(3)
    return read(size)
sys.stdin = types.SimpleNamespace(buffer=types.SimpleNamespace(read=once))
"""
    path.write_text(HANDLER + ends)
    more_than_a_pipe_holds = bytes(2**22)
    worker = WorkerProcess(path, (), writes=True)
    assert worker.request(more_than_a_pipe_holds, LIMITS) == more_than_a_pipe_holds and place.exists()


@POSIX
def test_a_child_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    place, path = tmp_path / "begun", tmp_path / "handler.py"
    begins = f"if not os.path.exists({str(place)!r}):\n    open({str(place)!r}, 'w')\n    os.kill(os.getpid(), 9)\n"
    path.write_text(HANDLER + begins)
    worker = WorkerProcess(path, (), setup=b"hello", writes=True)
    worker.begin()
    assert worker.greeting() == b"hello" and place.exists()


def test_the_end_of_the_program_ends_a_start_and_begins_no_other(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    path.write_text(HANDLER)
    worker = WorkerProcess(path, (), setup=b"sleep")
    worker.begin()
    while worker.pid is None:
        time.sleep(0.01)
    worker._finalizer()
    with pytest.raises(WorkerError):
        worker.greeting()
    assert worker.pid is None


def test_a_request_that_nobody_wants_any_more_ends_the_child(worker: WorkerProcess) -> None:
    asked = iter((False, False, True))
    with pytest.raises(Interrupted):
        worker.request(b"sleep", LIMITS, lambda: next(asked))
    assert worker.pid is None and answers(worker)


@LINUX
def test_memory_is_limited_for_each_request(worker: WorkerProcess) -> None:
    assert worker.request(b"take %d" % 2**27, ChildLimits(30, 1024)) == b"%d" % 2**27
    with pytest.raises(WorkerError) as caught:
        worker.request(b"take %d" % 2**27, ChildLimits(30, 128))
    assert not caught.value.late


@POSIX
def test_it_writes_no_file_and_knows_no_environment(
    worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert b"HF_TOKEN" not in worker.request(b"environ", LIMITS)
    with pytest.raises(WorkerError):
        worker.request(b"write " + str(tmp_path / "out").encode(), LIMITS)
    assert not (tmp_path / "out").exists() or not (tmp_path / "out").read_bytes()


def test_it_ends_with_the_parents_end_of_the_pipe_and_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    path.write_text(HANDLER)
    worker = WorkerProcess(path, ())
    assert answers(worker)
    (child,) = worker._children
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(30) == 0
    assert answers(worker)
    (child,) = worker._children
    del worker
    gc.collect()
    assert child.returncode is not None


@POSIX
def test_a_child_that_may_write_does(worker: WorkerProcess, tmp_path: Path) -> None:
    file = tmp_path / "written"
    with pytest.raises(WorkerError):
        worker.request(b"write " + os.fsencode(file), LIMITS)
    trusted = WorkerProcess(tmp_path / "handler.py", (), environ={"GIVEN": "1"}, writes=True)
    trusted.request(b"write " + os.fsencode(file), ChildLimits(30))
    assert file.read_bytes() == b"x" and b"GIVEN" in trusted.request(b"environ", ChildLimits(30))


@LINUX
def test_nothing_is_left_of_children_that_were_killed(worker: WorkerProcess) -> None:
    assert answers(worker)
    worker.close()
    before = len(os.listdir("/proc/self/fd"))
    for end in (b"die", b"sleep"):
        with pytest.raises(WorkerError):
            worker.request(end, ChildLimits(0.1 if end == b"sleep" else 30, 512))
    assert answers(worker)
    worker.close()
    assert len(os.listdir("/proc/self/fd")) == before
    states = subprocess.run(["ps", "-o", "stat=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert "Z" not in states


def test_a_system_that_starts_no_process_is_a_child_that_never_started(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_named: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        worker.begin()
        with pytest.raises(WorkerError):
            worker.greeting()
        with pytest.raises(WorkerError) as caught:
            worker.request(b"echo", LIMITS)
        assert not caught.value.late
    assert answers(worker)
    worker.begin()
    assert worker.greeting() == b"hello", "what went wrong before is over"


def test_what_is_wrong_with_the_start_is_told_by_the_greeting(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise SystemExit(1)")
    broken = WorkerProcess(path, ())
    absent = WorkerProcess(path, ("no_such_library_here",))
    kinds: list[tuple[WorkerProcess, type[Exception]]] = [(broken, WorkerError), (absent, MissingDependencyError)]
    for worker, kind in kinds:
        worker.begin()
        with pytest.raises(kind):
            worker.greeting()
        with pytest.raises(kind):
            worker.request(b"x", LIMITS)
