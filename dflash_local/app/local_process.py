"""A pair in the engine's process: the one that runs with it, or a new one. Refuses to know torch and screens."""

from __future__ import annotations

import os
import shutil
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
from typing import Any

from dflash_local import __version__, child_process
from dflash_local.app.engine_records import EngineRecord, read_records
from dflash_local.app.notices import Notify
from dflash_local.app.process_messages import (
    AskStatus,
    Cancel,
    Failed,
    Generate,
    Leave,
    Left,
    Occupied,
    Open,
    Opened,
    ProcessStatus,
    Stop,
)
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DeviceLostError
from dflash_local.events import Event, Finished, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.remote.server_log import last_line
from dflash_local.request import Request
from dflash_local.settings import Settings

MODULE = "dflash_local.app.engine_process"
POLL_S = 0.05
ANSWER_S = 2.0
LEAVE_S = 5.0  # what the process may take to end after its last command has left
CANCEL_S = 30.0  # what a reply may take to end; a cycle, or a piece of a prompt, ends well within this


@dataclass(slots=True)
class LocalProcess:
    """The session of the engine's process. ``lease``: the pair stays loaded as long as it is open.

    Attributes:
        process: the child, where this program started it.
    """

    record: EngineRecord
    lease: Connection[Any, Any]
    facts: SessionFacts
    process: subprocess.Popen[bytes] | None = None

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

    def close(self) -> None:
        """Leave the pair, and wait for the process to end where nobody else uses it."""
        with self.lease, suppress(EOFError, OSError):
            self.lease.send(Leave())
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


def open_process(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> LocalProcess:
    """Use a pair where it is loaded as asked for, else load it in a process of its own.

    Raises:
        DFlashError: see ``app.loading.open_held``. DeviceLostError: the process ended while it loaded.
    """
    for record in read_records(user) if user.attach else ():
        shared = _shared(record, pair, load, notify)
        if shared is not None:
            return shared
    return _started(pair, load, notify)


def running_engines(user: Settings) -> Iterator[tuple[EngineRecord, ProcessStatus]]:
    """The engine's processes of this user that answer, and what each holds."""
    for record in read_records(user):
        with suppress(OSError, EOFError, AuthenticationError), _connect(record) as connection:
            connection.send(AskStatus())
            if connection.poll(ANSWER_S):
                yield record, connection.recv()


def stop_engine(record: EngineRecord) -> None:
    """End a process, whoever uses it; wait until it is gone."""
    with suppress(OSError, EOFError, AuthenticationError), _connect(record) as connection:
        connection.send(Stop())
        if connection.poll(LEAVE_S):
            connection.recv()


def _shared(record: EngineRecord, pair: Pair, load: LoadConfig, notify: Notify) -> LocalProcess | None:
    """The session of a running process, where it has the pair as it is to be loaded."""
    try:
        lease = _connect(record)
    except (OSError, EOFError, AuthenticationError):
        return None
    try:
        answer = _opened(lease, pair, load, lambda _event: None)
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
    folder = Path(tempfile.mkdtemp(prefix="dflash-engine-"))
    with ExitStack() as stack:
        with (folder / "log").open("wb") as log:
            process = child_process.start(
                child_process.python_command(MODULE, [str(folder)]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the command
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        with process.stdout or ExitStack():
            line = process.stdout.readline() if process.stdout is not None else b""
        try:
            record = EngineRecord.from_line(line)
            lease = stack.enter_context(_connect(record))
            answer = _opened(lease, pair, load, notify)
        except (OSError, EOFError, ValueError) as error:  # ValueError: it said nothing
            raise _ended(process.pid, folder, process, " while it loaded") from error
        if isinstance(answer, Failed):
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            raise answer.error()
        assert isinstance(answer, Opened)  # nobody else knows of the process before it loads
        stack.pop_all()
        return LocalProcess(record, lease, replace(answer.facts, pid=record.owner.pid), process)


def _connect(record: EngineRecord) -> Connection[Any, Any]:
    return Client(record.address, authkey=bytes.fromhex(record.key))


def _opened(lease: Connection[Any, Any], pair: Pair, load: LoadConfig, notify: Notify) -> Opened | Occupied | Failed:
    """Ask for a pair and wait for it; told how far its load is."""
    lease.send(Open(__version__, pair, load))
    while True:
        message = lease.recv()
        if isinstance(message, (Opened, Occupied, Failed)):
            return message
        notify(message)


def _ended(pid: int, folder: Path, process: subprocess.Popen[bytes] | None, when: str = "") -> DeviceLostError:
    """That a process is gone, how, and the last line of its log."""
    how = ""
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LEAVE_S)
            how = f" ({signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
    line = last_line(folder / "log")
    message = f"the engine's process {pid} ended{when}{how}"
    return DeviceLostError(f"{message}: {line}" if line else message, f"its log: {folder / 'log'}" if line else "")
