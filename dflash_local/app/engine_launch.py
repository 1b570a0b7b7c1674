"""Launches a vLLM or SGLang server for a pair on this machine, and gives replies of it.

The server listens on loopback, at a free port, behind a fresh token, and ends with this program unless it is kept.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local import child_process
from dflash_local.app.engine_command import ServerCommand, server_command
from dflash_local.app.engine_server import EngineServer, known_pair
from dflash_local.app.notices import Notify
from dflash_local.app.resolve import Choice, choose
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.row import REMOTE_CODE
from dflash_local.errors import MissingDependencyError, ServerError, SettingsError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.remote.endpoint import TOKEN_VARIABLE, Endpoint
from dflash_local.remote.server_checks import PROGRAMS, Program
from dflash_local.remote.server_log import last_line
from dflash_local.service.service import Session
from dflash_local.service.wrapped import WrappedSession
from dflash_local.settings import Settings
from dflash_local.store.atomic import make_private, write_atomic

if TYPE_CHECKING:
    from dflash_local.remote.openai_server import ServerSession
    from dflash_local.remote.server_process import LoadPatience, ServerProcess

HOST = "127.0.0.1"
KEY_VARIABLE = "VLLM_API_KEY"  # SGLang has none: its key stands on its command line
LOADING_GRACE_S = 1.0  # while it loads it has nothing to finish, and vLLM does not listen
KEPT_LOGS = 20  # of all launched servers; older ones are removed


@dataclass(frozen=True, slots=True)
class LaunchedServer:
    """A server that was launched and answers; a ``with`` ends it.

    Attributes:
        url: where it listens. token: that it wants. log: everything that it wrote.
    """

    program: Program
    model: str
    url: str
    token: str = field(repr=False)
    log: Path
    _process: ServerProcess = field(repr=False)

    def __enter__(self) -> LaunchedServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the server, and of the process group of all that it started."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.alive

    @property
    def end(self) -> ServerError | None:
        """How it has ended, by itself or by somebody; None while it runs."""
        if self.alive:
            return None
        line = last_line(self.log)
        last = f"; its last line: {line}" if line else ""
        return ServerError(f"{PROGRAMS[self.program]} ended ({self._process.outcome}){last}", f"its log: {self.log}")

    @property
    def server(self) -> EngineServer:
        """What attaches to it."""
        return EngineServer(self.url, self.program, self.token)

    def stop(self) -> None:
        """End it and all that it started; takes seconds. Nothing where it was kept."""
        self._process.stop()

    def keep(self) -> str:
        """Let it run on after this program; says where, and how to use and end it.

        Raises:
            OSError: the file of its token cannot be written.
        """
        file = self.log.with_suffix(".token")
        write_atomic(file, self.token)
        self._process.release()
        attach = f"{TOKEN_VARIABLE}=$(cat {shlex.quote(str(file))}) dflash chat {shlex.quote(self.model)}"
        return f"{PROGRAMS[self.program]} stays at {self.url}: {attach} --url {self.url}; kill {self.pid} ends it"


def launch(
    program: Program,
    choice: Choice,
    user: Settings,
    drafts: bool = True,
    extra: Sequence[str] = (),
    notify: Notify = lambda _event: None,
    patience: LoadPatience | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    token: str | None = None,
) -> LaunchedServer:
    """Launch a server for a choice and wait until it answers; takes minutes.

    Args:
        choice: of ``app.resolve.choose``. drafts: False for the same server without its drafter.
        extra: arguments behind those of the registry. notify: told how far the start is.
        token: that it is to want; a fresh one if not given.

    Raises:
        MissingDependencyError: the program is not installed. ServerError: it ended or hung, and its line that says why.
        UsageError, DownloadError, SettingsError: see ``server_command``. Interrupted: cancelled.
    """
    from dflash_local.remote.server_process import LoadPatience, ServerProcess

    if os.name != "posix":
        raise UsageError(
            f"{PROGRAMS[program]} is not launched on this system", "start it on Linux (WSL2 is one); --url takes it"
        )
    command = server_command(program, choice, user, drafts, REMOTE_CODE in extra)
    executable = program_of(program, user)
    token, endpoint = token or secrets.token_urlsafe(24), _free_endpoint()
    argv = [str(executable), *command.words[1:], "--served-model-name", choice.name]
    argv += ["--host", HOST, "--port", endpoint.url.rpartition(":")[2]]
    argv += ["--api-key", token] if program == "sglang" else []
    log = _log_file(program, user)
    title = PROGRAMS[program]
    for name in command.fetched:
        notify(Notice(f"{name} is not on this machine: {title} downloads it; dflash pull would check every file"))
    granted = _granted(user, command, executable, token)
    process = ServerProcess(program, [*argv, *extra], user.environ, granted, Endpoint(endpoint.url, token), log)

    def progress(line: str, share: float) -> None:
        notify(LoadProgress(f"{title}: {line}", share))

    with ExitStack() as stack:
        stack.callback(process.stop, LOADING_GRACE_S)
        notify(Notice(f"{title} starts with {choice.name}, process {process.pid}; its log: {log}"))
        process.wait(progress, patience or LoadPatience(), cancelled)
        stack.pop_all()
    return LaunchedServer(program, choice.name, endpoint.url, token, log, process)


def program_of(program: Program, user: Settings) -> Path:
    """The program to start: the one that the user's setting names, else the one on PATH. Of SGLang its Python.

    Raises:
        SettingsError: the setting names no program. MissingDependencyError: there is none.
    """
    own = user.own_programs.get(program)
    if own is not None:
        path = Path(own).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            what = "the program vllm" if program == "vllm" else "the Python that has SGLang"
            raise SettingsError(f"DFLASH_{program.upper()}={own!r} is no program", f"give the path of {what}")
        return path.absolute()
    found = child_process.find_program(program)
    if found is None:
        executable = "vllm" if program == "vllm" else "python"
        raise MissingDependencyError(
            f"{PROGRAMS[program]} is not on PATH",
            f"python3 -m venv ENV, ENV/bin/pip install {program}, then DFLASH_{program.upper()}=ENV/bin/{executable}; "
            "or --url of a running server",
        )
    script = Path(os.path.realpath(found))  # PATH may reach it through a link, and its Python is beside it
    return script if program == "vllm" else script.with_name("python")


class LaunchedSession(WrappedSession):
    """The session of a launched server, which ends with it."""

    def __init__(self, session: Session, server: LaunchedServer) -> None:
        super().__init__(session)
        self.server = server

    def close(self) -> None:
        """Hang up and end the server, unless it was kept."""
        super().close()
        self.server.stop()


@dataclass(frozen=True, slots=True)
class LaunchingEngine:
    """A server that is launched for each pair that replies are wanted of; stands where ``EngineServer`` does.

    Attributes:
        extra: arguments of the program behind those of the registry; ``--trust-remote-code`` among them is the user's
            leave to run code of a model's repository. keep: leave it running in the end.
    """

    program: Program
    extra: tuple[str, ...] = ()
    drafts: bool = True
    keep: bool = False

    def pair(self, model: str | None, drafter: str | None, user: Settings) -> Pair:
        """The pair that a name means; nothing is launched or downloaded yet.

        Raises:
            UsageError: no name. UnknownModelError: no such pair.
        """
        if model is None:
            raise UsageError("no MODEL was given", "dflash models lists all")
        choose(model, drafter, user, draft=self.drafts)  # a name that only a running server knows is none here
        return known_pair(model, drafter, user)

    def session(
        self,
        pair: Pair,
        drafter: str | None,
        user: Settings,
        notify: Notify,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> LaunchedSession:
        """The session of a server that is launched now, and ends with it.

        Raises:
            DFlashError: see ``launched``.
        """
        server, session = self.launched(pair, drafter, user, notify, cancelled)
        with ExitStack() as stack:
            stack.callback(server.stop)
            if self.keep:
                notify(Notice(server.keep()))
            stack.pop_all()
            return LaunchedSession(session, server)

    def launched(
        self,
        pair: Pair,
        drafter: str | None,
        user: Settings,
        notify: Notify,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[LaunchedServer, ServerSession]:
        """A server of a pair, and its session, which does not end it.

        Args:
            drafter: see ``engine_server.starter``.

        Raises:
            DFlashError: see ``launch`` and ``EngineServer.session``; the server is ended then.
        """
        choice = choose(pair.name, drafter, user, draft=self.drafts)
        choice.announce(notify)
        with ExitStack() as stack:
            server = launch(self.program, choice, user, self.drafts, self.extra, notify, cancelled=cancelled)
            stack.callback(server.stop)
            session = server.server.session(pair, drafter if self.drafts else None, user, notify)
            stack.pop_all()
            return server, session


def _granted(user: Settings, command: ServerCommand, executable: Path, token: str) -> Mapping[str, str]:
    """The row's variables, the server's own token, and the user's token of the hub where the server downloads.

    The programs beside this one, such as a compiler's front end, come first on its PATH.
    """
    path = os.pathsep.join(filter(None, [str(executable.parent), user.environ.get("PATH", "")]))
    granted = {**command.environment, "PATH": path, "PYTHONUNBUFFERED": "1", KEY_VARIABLE: token}
    return granted | ({"HF_TOKEN": user.hub.token} if command.fetched and user.hub.token else {})


def _free_endpoint() -> Endpoint:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return Endpoint(f"http://{HOST}:{free.getsockname()[1]}")


def _log_file(program: Program, user: Settings) -> Path:
    """A new log's path; of older ones the last few are left.

    Raises:
        SettingsError: there is no home folder.
    """
    if user.state_dir is None:
        raise SettingsError("there is no folder for the server's log: no home folder", "set HOME or DFLASH_HOME")
    folder = user.state_dir / "engines"
    try:
        make_private(folder)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be made: {error.strerror}", "it takes the server's log") from error
    with suppress(OSError):
        for old in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[: -(KEPT_LOGS - 1)]:
            old.unlink()
            old.with_suffix(".token").unlink(missing_ok=True)
    return folder / f"{program}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.log"
