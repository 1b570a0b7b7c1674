"""The process that holds a loaded pair, for all commands of this user: ``python -m dflash_local.app.engine_process``.

It loads what the first command opens, lets the requests of all take turns, and ends with its last command. A fault of
the driver, a hang or a panic of a library ends this process and not the screen that shows its replies.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from dflash_local import __version__, settings
from dflash_local.app.loading import open_held
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
from dflash_local.app.process_records import ProcessRecord
from dflash_local.errors import DeviceLostError, DFlashError
from dflash_local.service.service import Service
from dflash_local.service.ticket import Ticket
from dflash_local.settings import Settings
from dflash_local.store.owner import Owner

CLOSE_S = 1.5  # until the process ends, whatever it is doing
SAVE_S = 30.0  # likewise, where it writes conversations to files
FIRST_COMMAND_S = 60.0  # until the command that started this process opens a pair


class EngineProcess:
    """Its one pair and those who use it. Every connection has a thread of its own."""

    def __init__(self, user: Settings, record: ProcessRecord) -> None:
        self._user, self._record = user, record
        self._recorded: Path | None = None
        self._loading = threading.Lock()  # held while a pair is loaded or looked at
        self._leases, self._counting = 0, threading.Lock()
        self._service: Service | None = None
        self._kept = False  # a client asked for it: the process stays without clients
        self._name, self._measuring = "", False

    def accept(self, listener: Listener) -> None:
        """Answer everyone who knows the key, for ever."""
        threading.Thread(target=self._end_if_unused, daemon=True).start()
        while True:
            with suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _end_if_unused(self) -> None:
        """The command that started this process may have been killed before it opened anything."""
        time.sleep(FIRST_COMMAND_S)
        if self._leases == 0:
            self.end()

    def end(self) -> None:
        """End the process: what runs is cancelled, and memory is free within two seconds, or when files are written."""
        if self._recorded is not None:
            self._recorded.unlink(missing_ok=True)
        if self._service is not None:
            closing = threading.Thread(target=self._service.close, daemon=True)
            closing.start()
            facts = self._service.facts
            closing.join(SAVE_S if facts is not None and facts.load.cache_disk else CLOSE_S)
        shutil.rmtree(self._record.folder, ignore_errors=True)
        os._exit(0)

    def _answer(self, connection: Connection[Any, Any]) -> None:
        with connection, suppress(EOFError, OSError):
            message = connection.recv()
            if isinstance(message, Open):
                self._lease(connection, message)
            elif isinstance(message, Generate):
                self._reply(connection, message)
            elif isinstance(message, CountTokens):
                self._count(connection, message)
            elif isinstance(message, Measure):
                self._measure(connection, message)
            elif isinstance(message, AskStatus):
                facts = None if self._service is None else self._service.facts
                held = () if self._service is None else self._service.held()
                state: Any = "measuring" if self._measuring else "ready" if facts is not None else "loading"
                connection.send(ProcessStatus(self._name, state, facts, self._leases, held))
            elif isinstance(message, Stop):
                self.end()

    def _lease(self, connection: Connection[Any, Any], message: Open) -> None:
        """Hold the pair for a command until it leaves or is gone."""
        with self._counting:
            self._leases += 1
        try:
            answer = self._open(connection, message)
            connection.send(answer)
            if isinstance(answer, Opened):
                left = connection.recv()  # or the end of the connection
                self._kept = self._kept or (isinstance(left, Leave) and left.keep)
        except (EOFError, OSError):
            pass
        with self._counting:
            self._leases -= 1
            last = self._leases == 0 and not self._kept
        with suppress(OSError):
            connection.send(Left(last))
        if last:
            self.end()

    def _open(self, connection: Connection[Any, Any], message: Open) -> Opened | Occupied | Failed:
        if self._measuring or self._name not in ("", message.pair.name):
            return Occupied("")  # at once: another pair's load, or a measurement, takes minutes
        with self._loading:
            if self._service is not None:
                return self._shared(self._service, message)
            self._name = message.pair.name
            self._recorded = self._record.write(self._user)  # not before: nobody comes ahead of who started it
            try:
                session = open_held(message.pair, message.load, self._user, connection.send)
            except Exception as fault:
                return Failed.of(fault, "the load")
            self._service = Service.over(session)
            return Opened(session.facts)

    def _shared(self, service: Service, message: Open) -> Opened | Occupied:
        """The loaded pair, where loading would bring the same: the same folders, and every option that was given."""
        pair, load, facts = message.pair, message.load, service.facts
        assert facts is not None  # it is loaded
        other = facts.target != pair.target_label or (load.draft and facts.drafter != pair.drafter_label)
        if other or service.fault is not None or message.version != __version__:
            return Occupied("")
        unlike = load.unlike(facts.load)
        if unlike:
            return Occupied(f"{pair.name} is loaded without {' '.join(unlike)} ({facts.loaded_as})")
        return Opened(facts)

    def _measure(self, connection: Connection[Any, Any], message: Measure) -> None:
        """Do a job here, where it may load what it measures; its command's end is the end of this process."""
        self._name, self._measuring, self._leases = message.name, True, 1
        self._recorded = self._record.write(self._user)
        threading.Thread(target=self._end_with, args=(connection,), daemon=True).start()
        try:
            answer: Any = MeasureResult(message.job(self._user, connection.send))
        except Exception as fault:
            answer = Failed.of(fault, "the measurement")
        connection.send(answer)
        threading.Event().wait()  # the connection stays open until its command closes it, which ends the process

    def _end_with(self, connection: Connection[Any, Any]) -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        self.end()

    def _sound(self) -> Service:
        """The service over the loaded pair. DeviceLostError: the engine broke."""
        service = self._service
        if service is None or service.fault is not None:
            fault = "nothing is loaded" if service is None or service.fault is None else service.fault.message
            raise DeviceLostError(f"the engine broke: {fault}", "send it again")
        return service

    def _count(self, connection: Connection[Any, Any], message: CountTokens) -> None:
        try:
            connection.send(self._sound().count(message.request))
        except DFlashError as error:
            connection.send(Failed.of(error))

    def _reply(self, connection: Connection[Any, Any], message: Generate) -> None:
        try:
            ticket = self._sound().submit(message.request)
            threading.Thread(target=_watch, args=(connection, ticket), daemon=True).start()
            try:
                for event in ticket:
                    connection.send(event)
            except OSError:
                ticket.cancel()
        except DFlashError as error:
            connection.send(Failed.of(error))


def _watch(connection: Connection[Any, Any], ticket: Ticket) -> None:
    """Cancel a reply when its reader says so, or is gone."""
    with suppress(EOFError, OSError):
        while not isinstance(connection.recv(), Cancel):
            pass
    ticket.cancel()


def main(folder: Path) -> None:
    """Listen in a private folder, say on standard output where, and work until the last command leaves."""
    user, key = settings.load(), secrets.token_bytes(32)
    address = None if sys.platform == "win32" else str(folder / "socket")
    with Listener(address, backlog=16, authkey=key) as listener:
        record = ProcessRecord(Owner.me("engine"), str(listener.address), key.hex(), str(folder))
        sys.stdout.write(record.line)
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to the log
        EngineProcess(user, record).accept(listener)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
