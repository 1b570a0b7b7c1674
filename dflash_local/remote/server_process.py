"""A server of another program as a process of this one: started with a log, watched until it answers, ended.

It has a session of its own, so that Ctrl-C is for this program alone, and a second process ends it where this one is
killed.
"""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_local import child_process, terminal
from dflash_local.errors import DFlashError, Interrupted, MissingDependencyError, ServerError
from dflash_local.remote import server_log
from dflash_local.remote.endpoint import TOKEN_VARIABLE, ServerEndpoint, within
from dflash_local.remote.programs import PROGRAMS, launching_of
from dflash_local.remote.programs.server_program import Program, variable_of
from dflash_local.remote.server_watch import END_S
from dflash_local.store.atomic import FILE_MODE, make_private, write_atomic

WATCH = Path(__file__).with_name("server_watch.py")
HEALTH = "/health"  # of all programs; needs no token
HEALTH_S = 5.0
POLL_S = 0.5
Progress = Callable[[str, float], None]  # what a start is at, and how far (0..1)


@dataclass(frozen=True, slots=True)
class LoadPatience:
    """When a start is given up, in seconds: as a whole, which may hold a download, and without a line in its log."""

    total_s: float = 3 * 3600.0
    silent_s: float = 1200.0


class ServerProcess:
    """A server that was started.

    A ``with`` ends it.

    Attributes:
        endpoint: where it listens, or will. log: everything that it writes. model: what requests call its model.

    Args:
        argv: its program first. environ, granted: see ``child_process.start``.

    Raises:
        MissingDependencyError: the program cannot be started. OSError: the log cannot be written.
    """

    def __init__(
        self,
        program: Program,
        argv: Sequence[str],
        environ: Mapping[str, str],
        granted: Mapping[str, str],
        endpoint: ServerEndpoint,
        log: Path,
        model: str,
    ) -> None:
        self.endpoint, self.log, self.model = endpoint, log, model
        self._title, self._launching = PROGRAMS[program].title, launching_of(program)
        self._lock = threading.Lock()
        self._left = False  # ended, or no longer ours to end
        make_private(log.parent)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
        try:
            self._process = child_process.start(
                argv,
                environ,
                granted,
                log.parent,  # empty but for logs, since ``python -m`` looks there first
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MissingDependencyError(
                f"{self._title} cannot be started: {terminal.safe_line(argv[0])}: {error.strerror}",
                f"{variable_of(program)}=PATH names another one",
            ) from error
        finally:
            os.close(descriptor)
        self._watch = child_process.start(
            [sys.executable, "-I", "-S", str(WATCH), str(self._process.pid)],
            environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of the server, and of its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def _outcome(self) -> str:
        code = self._process.poll()
        return "" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def wait(
        self,
        progress: Progress,
        patience: LoadPatience = LoadPatience(),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until it answers.

        Raises:
            ServerError: it ended, or took too long. Interrupted: it was cancelled. It runs on in these two cases.
        """
        began = heard = time.monotonic()
        size = 0
        while not self._answers():
            now = time.monotonic()
            if not self.alive:
                raise self._ended()
            written = self.log.stat().st_size
            if written != size:
                size, heard = written, now
            if now - began > patience.total_s or now - heard > patience.silent_s:
                raise self._too_late(now - began, now - heard > patience.silent_s)
            if cancelled():
                raise Interrupted(f"the start of {self._title} was broken off")
            line = server_log.last_line(self.log)
            share = server_log.share(self.log, self._launching.stages)
            progress(f"{now - began:.0f} s: {line}" if line else "starting", share)
            time.sleep(POLL_S)

    def stop(self, grace_s: float = END_S) -> None:
        """End it and all that it started; takes seconds. Nothing where that was done, or it was released.

        Args:
            grace_s: what it may take to end by itself.
        """
        with self._lock:
            if self._left:
                return
            self._left = True
            group = self._process.pid
            with suppress(ProcessLookupError, PermissionError):
                if self.alive:
                    self._process.terminate()  # it ends its own processes best itself
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(grace_s)
                os.killpg(group, signal.SIGKILL)  # also what outlived the server itself
            self._process.wait()
            self._dismiss()

    def keep(self) -> str:
        """Let it run on after this program; return a line on where, and how to use and end it.

        Raises:
            OSError: the file of its token cannot be written.
        """
        file = self.log.with_suffix(".token")
        write_atomic(file, self.endpoint.token or "")
        with self._lock:
            if not self._left:
                self._left = True
                self._dismiss()
        attach = f"{TOKEN_VARIABLE}=$(cat {shlex.quote(str(file))}) dflash chat {shlex.quote(self.model)}"
        url = self.endpoint.url
        return f"{self._title} stays at {url}: {attach} --url {url}; kill {self.pid} ends it"

    @property
    def end(self) -> ServerError | None:
        """How it has ended, by itself or by somebody; None while it runs."""
        return self.end_within(0.0)

    def end_within(self, seconds: float) -> ServerError | None:
        """Wait so long for its end, and return how it ended; None where it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self.alive:
            return None
        line = server_log.last_line(self.log)
        last = f"; its last line: {line}" if line else ""
        return ServerError(f"{self._title} ended ({self._outcome}){last}", self._hint)

    def _dismiss(self) -> None:
        """The watching process has nothing to do any more."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._watch.communicate(b"left", timeout=END_S)

    def _answers(self) -> bool:
        try:
            status, _ = self.endpoint.get(HEALTH, within(HEALTH_S))
        except DFlashError:
            return False
        return status == http.client.OK and self.alive  # and not another program at a port that it could not have

    def _ended(self) -> ServerError:
        why = server_log.reason(self.log)
        return ServerError(
            f"{self._title} ended while it started ({self._outcome}){f': {why}' if why else ''}", self._hint
        )

    def _too_late(self, seconds: float, silent: bool) -> ServerError:
        what = "has written nothing for too long" if silent else "takes too long to start"
        line = server_log.last_line(self.log)
        last = f"; its last line: {line}" if line else ""
        return ServerError(f"{self._title} {what}, {seconds:.0f} s after its start{last}", self._hint)

    @property
    def _hint(self) -> str:
        return f"its log: {self.log}"
