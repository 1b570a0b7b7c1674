"""A child process for work that may go wrong: killed when late, started again when needed. ``child.py`` runs there."""

from __future__ import annotations

import importlib.util
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dflash_local import child_process
from dflash_local.errors import Interrupted, MissingDependencyError

START_S = 30.0
POLL_S = 0.05  # how often a waiting request looks whether it is still wanted
WAIT_S = 0.25  # a lock waited for without limit cannot be interrupted by Ctrl-C on every system
MAX_FRAME_BYTES = 64 * 2**20
KILLED = (-signal.SIGKILL, -signal.SIGTERM) if os.name == "posix" else ()  # no fault of a child's own ends it so
SPENT = -signal.SIGPROF if os.name == "posix" else None  # so ends a child whose processor time is used up
# Bytes that follow; seconds, milliseconds of processor time and MiB of memory that the answer may take.
_REQUEST = struct.Struct(">IIII")
_ANSWER = struct.Struct(">I")
_RUNNER = Path(__file__).with_name("child.py")


class WorkerError(Exception):
    """Says that the child gave no answer. ``late``: it took longer than allowed, otherwise it died or never started."""

    def __init__(self, late: bool) -> None:
        super().__init__("late" if late else "died")
        self.late = late


class _EndedError(WorkerError):
    """Says that something else than the request ended the child, before it had all of it or from outside."""

    def __init__(self) -> None:
        super().__init__(late=False)


class ChildLimits(NamedTuple):
    """Says what one answer may take; 0 is no limit of memory or of processor time."""

    seconds: float
    mebibytes: int = 0
    processor_seconds: float = 0.0


class WorkerProcess:
    """Runs one child, shared by all threads; a lock lets one request in at a time.

    It knows neither the package nor the environment but for what it is given, cannot write files unless it is allowed
    to, and ends when this object or the parent does. Ctrl-C in the parent's terminal does not reach it.

    Args:
        handler: the file whose ``answer(bytes) -> bytes`` the child calls.
        libraries: names of the modules that it needs.
        setup: sent first to every new child, where given, within ``setup_limits``.
        environ: all that the child's environment holds (on Windows, which cannot start so, that of any other child).
        writes: it may write files.
    """

    def __init__(
        self,
        handler: Path,
        libraries: Sequence[str],
        setup: bytes = b"",
        setup_limits: ChildLimits | None = None,
        environ: Mapping[str, str] | None = None,
        writes: bool = False,
    ) -> None:
        self._libraries, self._environ = libraries, environ or {}
        self._setup, self._setup_limits = setup, setup_limits or ChildLimits(START_S)
        self._words = [str(handler), "writes" if writes else "writes nothing"]
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []  # the one that lives, if any
        self._greeting = b""
        self._starting: threading.Thread | None = None
        self._failure: WorkerError | MissingDependencyError | None = None
        self._finalizer = weakref.finalize(self, _end, self._children)  # also at the end of the program

    def request(self, data: bytes, limits: ChildLimits, cancelled: Callable[[], bool] = lambda: False) -> bytes:
        """Answer of the handler; where something else ends the child, such as the system, a new one is asked.

        Raises:
            WorkerError: no answer came within the limits; the next request starts a new child.
            Interrupted: ``cancelled`` said so; the child was killed.
        """
        with self._lock:
            try:
                return self._exchange(self._child(cancelled), data, limits, cancelled)
            except _EndedError:
                return self._exchange(self._child(cancelled), data, limits, cancelled)

    def begin(self) -> None:
        """Start the child in the background; what goes wrong is raised by ``greeting``."""
        self._failure = None
        self._starting = threading.Thread(target=self._begin, name="dflash-worker-start", daemon=True)
        self._starting.start()

    def greeting(self) -> bytes:
        """Return the answer to ``setup``, when it is there. WorkerError: none in time. MissingDependencyError."""
        while self._starting is not None and self._starting.is_alive():
            self._starting.join(WAIT_S)
        if self._failure is not None:
            raise self._failure
        return self._greeting

    @property
    def pid(self) -> int | None:
        return self._children[0].pid if self._children else None

    def close(self) -> None:
        """End the child; the next request starts a new one."""
        with self._lock:
            _end(self._children)

    def _child(self, cancelled: Callable[[], bool] = lambda: False) -> subprocess.Popen[bytes]:
        for child in list(self._children):  # the end of the program empties it without the lock
            if child.poll() is None:
                return child
        if not self._finalizer.alive:
            raise WorkerError(late=False)
        return self._start(cancelled)

    def _begin(self) -> None:
        with self._lock:
            try:
                with suppress(_EndedError):
                    self._child()
                self._child()
            except (WorkerError, MissingDependencyError) as error:
                self._failure = error

    def _start(self, cancelled: Callable[[], bool]) -> subprocess.Popen[bytes]:
        _end(self._children)
        command = [sys.executable, "-I", str(_RUNNER), *self._words, *_folders(self._libraries)]
        # -I keeps PYTHON* variables, the user's site and the current folder out; the environment holds what was given
        # and no more, because code that breaks out must find no token in it.
        try:
            process = child_process.start(
                command,
                None if sys.platform == "win32" else self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
            )
        except OSError as error:  # no memory, or too many processes or open files
            raise WorkerError(late=False) from error
        self._children.append(process)
        self._exchange(process, None, ChildLimits(START_S), cancelled)
        if self._setup:
            self._greeting = self._exchange(process, self._setup, self._setup_limits, cancelled)
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], data: bytes | None, limits: ChildLimits, cancelled: Callable[[], bool]
    ) -> bytes:
        """Send a frame (nothing for None) and read one; whatever goes wrong ends the child."""
        answer: bytes | None = None
        taken = False
        watch = _Watch(process, limits.seconds, cancelled)
        try:
            with watch:
                if data is not None and process.stdin is not None:
                    milliseconds = round(limits.processor_seconds * 1000)
                    numbers = len(data), round(limits.seconds), milliseconds, limits.mebibytes
                    process.stdin.write(_REQUEST.pack(*numbers))
                    process.stdin.write(data)
                    process.stdin.flush()
                taken = True
                answer = _receive(process)
        except (OSError, ValueError):  # a pipe whose other end, or whose own, is closed
            answer = None
        finally:  # an answer that nobody read would be taken for the next request's
            if answer is None or watch.cancelled or watch.late:
                _end(self._children)
        if watch.cancelled:
            raise Interrupted("cancelled while a child process was at work")
        if answer is None:
            late = watch.late or process.returncode == SPENT
            blameless = not taken or process.returncode in KILLED
            raise _EndedError if blameless and not late else WorkerError(late)
        return answer


class _Watch:
    """Kills the process when the time is up or nobody wants the answer any more, from a thread."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, cancelled: Callable[[], bool]) -> None:
        self.late = self.cancelled = False
        self._process, self._until, self._is_cancelled = process, time.monotonic() + seconds, cancelled
        self._done = threading.Event()
        self._lock = threading.Lock()  # so that nothing is killed once the answer is there
        self._thread = threading.Thread(target=self._look, name="dflash-worker-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._done.set()

    def _look(self) -> None:
        while not self._done.wait(POLL_S):
            with self._lock:
                if self._done.is_set():
                    return
                self.cancelled = self._is_cancelled()
                self.late = not self.cancelled and time.monotonic() > self._until
                if self.cancelled or self.late:
                    self._process.kill()
                    return


def _receive(process: subprocess.Popen[bytes]) -> bytes | None:
    """Return the next frame; None when the child is dead or babbling."""
    if process.stdout is None:
        return None
    head = process.stdout.read(_ANSWER.size)
    size = _ANSWER.unpack(head)[0] if len(head) == _ANSWER.size else MAX_FRAME_BYTES + 1
    data = process.stdout.read(size) if size <= MAX_FRAME_BYTES else b""
    return data if len(data) == size else None


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Kill the child and give its pipes back."""
    while children:
        process = children.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent bytes of a request that killed the child
                    pipe.close()


def _folders(libraries: Sequence[str]) -> list[str]:
    """Return where the libraries lie, for a child that ignores PYTHONPATH and the user's site."""
    folders = []
    for name in libraries:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingDependencyError(f"{name} is not installed", f"pip install {name}")
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))
