"""A pair in the engine's process: the one that runs with it, or a new one. Refuses to know torch and screens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from zlib import crc32

from dflash_local import __version__, child_process
from dflash_local.app.notices import Notify
from dflash_local.app.process_messages import (
    AskStatus,
    Cancel,
    CountTokens,
    Failed,
    Generate,
    Leave,
    Left,
    Measure,
    MeasureResult,
    Occupied,
    Open,
    Opened,
    ProcessStatus,
    Stop,
)
from dflash_local.app.process_records import ProcessRecord, read_records
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import BusyError, DeviceLostError, Interrupted
from dflash_local.events import Event, Finished, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import HeldCount, SessionFacts
from dflash_local.remote.server_log import reason
from dflash_local.request import Request
from dflash_local.settings import Settings
from dflash_local.store.lock import exclusive, folder_of

MODULE = "dflash_local.app.engine_process"
Result = TypeVar("Result")
POLL_S = 0.05
ANSWER_S = 2.0
LEAVE_S = 5.0  # what the process may take to end after its last command has left
CANCEL_S = 30.0  # what a reply may take to end; a cycle, or a piece of a prompt, ends well within this


@dataclass(slots=True)
class LocalProcess:
    """The session of the engine's process. ``lease``: the pair stays loaded as long as it is open.

    Attributes:
        process: the child, where this program started it. keep: it stays when its last client has left.
    """

    record: ProcessRecord
    lease: Connection[Any, Any]
    facts: SessionFacts
    process: subprocess.Popen[bytes] | None = None
    keep: bool = False
    set_aside: ClassVar[None] = None  # the process does it

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Answer ``request``: the events of the process up to and including ``Finished``.

        Raises:
            DFlashError: the one that ended the request there. DeviceLostError: the process has ended, or hangs.
        """
        asked_at: float | None = None
        try:
            with _connect(self.record) as connection:
                connection.send(Generate(request))
                while True:
                    if asked_at is None and cancelled():
                        asked_at = time.monotonic()
                        connection.send(Cancel())
                    if not connection.poll(POLL_S):
                        if asked_at is not None and time.monotonic() - asked_at > CANCEL_S:
                            raise self._hangs()
                        continue
                    message = connection.recv()
                    if isinstance(message, Failed):
                        raise message.error()
                    yield message
                    if isinstance(message, Finished):
                        return
        except (EOFError, OSError, AuthenticationError) as error:
            raise self._ended() from error

    def count(self, request: Request) -> int:
        """Return the tokens of the prompt, counted by the process beside its replies; raises as ``generate`` does."""
        try:
            with _connect(self.record) as connection:
                connection.send(CountTokens(request))
                answer = connection.recv()
        except (EOFError, OSError, AuthenticationError) as error:
            raise self._ended() from error
        if isinstance(answer, Failed):
            raise answer.error()
        return int(answer)

    def held(self) -> tuple[HeldCount, ...]:
        """Count the conversations that the process can go on from; none where it does not answer."""
        with suppress(OSError, EOFError, AuthenticationError):
            return _status(self.record).held
        return ()

    def close(self) -> None:
        """Leave the pair, and wait for the process to end where nobody else uses it."""
        with self.lease, suppress(EOFError, OSError):
            self.lease.send(Leave(self.keep))
            if self.lease.poll(LEAVE_S) and self.lease.recv() == Left(ends=True) and self.lease.poll(LEAVE_S):
                self.lease.recv()  # the end of the connection

    def _ended(self) -> DeviceLostError:
        return _ended(self.record.owner.pid, Path(self.record.folder), self.process)

    def _hangs(self) -> DeviceLostError:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.record.owner.pid, signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        return DeviceLostError(
            f"the engine did not stop a reply within {CANCEL_S:.0f} s and was ended", "send it again"
        )


def open_process(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, keep: bool = False) -> LocalProcess:
    """Use a pair where it is loaded as asked for, else load it in a process of its own.

    Args:
        keep: the process stays when its last client has left.

    Raises:
        DFlashError: see ``app.loading.open_held``. DeviceLostError: the process ended while it loaded.
    """
    starting = f"engine-{crc32(pair.name.encode()):08x}"
    with exclusive(folder_of(user) if user.attach else None, starting, purpose="load"):  # of two at once, one loads it
        for record in _engines(user) if user.attach else ():
            shared = _shared(record, pair, load, notify)
            if shared is not None:
                break
        else:
            shared = _started(pair, load, notify)
    shared.keep = keep
    return shared


def running_engines(user: Settings) -> Iterator[tuple[ProcessRecord, ProcessStatus]]:
    """The engine's processes of this user that answer, and what each holds."""
    for record in _engines(user):
        with suppress(OSError, EOFError, AuthenticationError):
            yield record, _status(record)


def _status(record: ProcessRecord) -> ProcessStatus:
    """Ask a process what it holds. OSError, EOFError, AuthenticationError: it does not answer."""
    with _connect(record) as connection:
        connection.send(AskStatus())
        if not connection.poll(ANSWER_S):
            raise TimeoutError
        status: ProcessStatus = connection.recv()
        return status


def _engines(user: Settings) -> Iterator[ProcessRecord]:
    return (record for record in read_records(user) if record.is_engine)


def stop_engine(record: ProcessRecord) -> None:
    """End a process, whoever uses it; wait until it is gone."""
    with suppress(OSError, EOFError, AuthenticationError), _connect(record) as connection:
        connection.send(Stop())
        if connection.poll(LEAVE_S):
            connection.recv()


def _shared(record: ProcessRecord, pair: Pair, load: LoadConfig, notify: Notify) -> LocalProcess | None:
    """The session of a running process, where it has the pair as it is to be loaded."""
    try:
        lease = _connect(record)
    except (OSError, EOFError, AuthenticationError):
        return None
    try:
        lease.send(Open(__version__, pair, load))
        while not isinstance(answer := lease.recv(), (Opened, Occupied, Failed)):
            pass
    except (OSError, EOFError):
        answer = None
    if isinstance(answer, Opened):
        notify(Notice(f"using the pair that process {record.owner.pid} keeps loaded: {answer.facts.loaded_as}"))
        return LocalProcess(record, lease, replace(answer.facts, pid=record.owner.pid))
    lease.close()
    if isinstance(answer, Occupied) and answer.reason:
        notify(Notice(f"process {record.owner.pid}: {answer.reason}; it is loaded once more"))
    return None


def _started(pair: Pair, load: LoadConfig, notify: Notify) -> LocalProcess:
    """A new process with the pair loaded; ended again where that fails."""
    with ExitStack() as stack:
        record, process, lease = _start(stack, Open(__version__, pair, load))
        answer = _answer(lease, notify, process, record, " while it loaded")
        if isinstance(answer, Failed):
            raise answer.error()
        assert isinstance(answer, Opened)  # nobody else knows of the process before it loads
        stack.pop_all()
        return LocalProcess(record, lease, replace(answer.facts, pid=record.owner.pid), process)


def measure(
    name: str,
    job: Callable[[Settings, Notify], Result],
    user: Settings,
    notify: Notify,
    cancelled: Callable[[], bool] = lambda: False,
) -> Result:
    """Load and measure a model in a process of its own, alone with the device.

    Args:
        name: of the model. job: a ``partial`` of a function, as of ``app.measurements``; the process gives it settings
            and who is told how far it is. cancelled: polled; True ends the process, as Ctrl-C does.

    Raises:
        BusyError: another command has a model loaded. Interrupted: it was cancelled. DFlashError: what the job
            raised. DeviceLostError: the process ended.
    """
    if user.in_process:
        return job(user, notify)  # nothing but Ctrl-C ends it
    for record, status in running_engines(user):
        raise BusyError(
            f"process {record.owner.pid} has {status.name} loaded: what is measured beside it would be wrong",
            f"end the command that uses it, or dflash stop {status.name}",
        )
    with ExitStack() as stack:
        record, process, connection = _start(stack, Measure(name, job))
        answer = _answer(connection, notify, process, record, " while it measured", cancelled)
        if isinstance(answer, Failed):
            raise answer.error()
        result: Result = answer.result
        return result


def _start(
    stack: ExitStack, message: Open | Measure
) -> tuple[ProcessRecord, subprocess.Popen[bytes], Connection[Any, Any]]:
    """Start a process and send it its first message; the end of ``stack`` ends it."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-engine-"))
    with (folder / "log").open("wb") as log:
        process = child_process.start(
            child_process.python_command(MODULE, [str(folder)]),
            # A measurement is told of folders as the user named them; a pair that is opened has whole paths.
            folder=child_process.USERS_FOLDER if isinstance(message, Measure) else child_process.OWN_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the command
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
        )
    stack.callback(_end, process)
    with process.stdout or ExitStack():
        line = process.stdout.readline() if process.stdout is not None else b""
    try:
        record = ProcessRecord.from_line(line)
        connection = stack.enter_context(_connect(record))
        connection.send(message)
    except (OSError, EOFError, ValueError) as error:  # ValueError: it said nothing
        raise _ended(process.pid, folder, process, " at its start") from error
    return record, process, connection


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process whose connection was closed to clear up and end; kill it where it does not."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVE_S)
    process.kill()
    process.wait()


def _answer(
    connection: Connection[Any, Any],
    notify: Notify,
    process: subprocess.Popen[bytes],
    record: ProcessRecord,
    when: str,
    cancelled: Callable[[], bool] = lambda: False,
) -> Any:
    """Wait for an answer; told how far it is."""
    try:
        while True:
            if cancelled():
                raise Interrupted("the measurement was stopped")
            if connection.poll(POLL_S):
                message = connection.recv()
                if isinstance(message, (Opened, Occupied, MeasureResult, Failed)):
                    return message
                notify(message)
    except (OSError, EOFError) as error:
        raise _ended(process.pid, Path(record.folder), process, when) from error


def _connect(record: ProcessRecord) -> Connection[Any, Any]:
    return Client(record.address, authkey=bytes.fromhex(record.key))


def _ended(pid: int, folder: Path, process: subprocess.Popen[bytes] | None, when: str = "") -> DeviceLostError:
    """That a process is gone, how, and why as its log says."""
    how = ""
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LEAVE_S)
            how = f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
    line = reason(folder / "log")
    message = f"the engine's process {pid} ended{when}{how}"
    return DeviceLostError(f"{message}: {line}" if line else message, f"its log: {folder / 'log'}" if line else "")
