"""Launches a server of another program for a pair on this machine.

The server listens on loopback, at a free port, behind a fresh token, and ends with this program unless it is kept.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local import child_process
from dflash_local.app.notices import Notify
from dflash_local.app.resolve import Choice
from dflash_local.app.server_command import ServerCommand, server_command
from dflash_local.catalog.row import REMOTE_CODE
from dflash_local.errors import MissingDependencyError, SettingsError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.remote.endpoint import ServerEndpoint
from dflash_local.remote.programs import PROGRAMS, launching_of
from dflash_local.remote.programs.server_program import Program, variable_of
from dflash_local.settings import DEVICE_ORDER, LIBRARY_DEFAULTS, Settings
from dflash_local.store.atomic import make_private

if TYPE_CHECKING:
    from dflash_local.remote.server_process import LoadPatience, ServerProcess

HOST = "127.0.0.1"
LOADING_GRACE_S = 1.0  # while it loads it has nothing to finish, and vLLM does not listen
KEPT_LOGS = 20  # of all launched servers; older ones are removed


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
    gpus: int | None = None,
    visible: str = "",
) -> ServerProcess:
    """Launch a server for a choice and wait until it answers; takes minutes.

    Args:
        choice: of ``app.resolve.choose``. drafts: False for the same server without its drafter.
        extra: arguments behind those of the registry. notify: told how far the start is.
        token: that it is to want; a fresh one if not given. gpus: see ``server_command``.
        visible: its ``CUDA_VISIBLE_DEVICES``; the user's own where empty.

    Raises:
        MissingDependencyError: the program is not installed. ServerError: it ended or hung, and its line that says why.
        UsageError, DownloadError, SettingsError: see ``server_command``. Interrupted: cancelled.
    """
    from dflash_local.remote.server_process import LoadPatience, ServerProcess

    if os.name != "posix":
        raise UsageError(
            f"{PROGRAMS[program].title} is not launched on this system",
            "start it on Linux (WSL2 is one); --url takes it",
        )
    command = server_command(program, choice, user, drafts, REMOTE_CODE in extra, gpus)
    executable = program_of(program, user)
    token, endpoint = token or secrets.token_urlsafe(24), _free_endpoint()
    how = launching_of(program)
    argv = [str(executable), *command.words[1:], how.name_option, choice.name]
    argv += ["--host", HOST, "--port", endpoint.url.rpartition(":")[2]]
    argv += [] if how.key_variable else ["--api-key", token]
    log = _log_file(program, user)
    title = PROGRAMS[program].title
    if command.remark:
        notify(Notice(command.remark))
    for name in command.fetched:
        notify(Notice(f"{name} is not on this machine: {title} downloads it; dflash pull would check every file"))
    own = {how.key_variable: token} if how.key_variable else {}
    order = user.environ.get(DEVICE_ORDER, LIBRARY_DEFAULTS[DEVICE_ORDER])
    own |= {"CUDA_VISIBLE_DEVICES": visible, DEVICE_ORDER: order} if visible else {}
    granted = _granted(user, command, executable, own)
    where = ServerEndpoint(endpoint.url, token)
    process = ServerProcess(program, [*argv, *extra], user.environ, granted, where, log, choice.name)

    def progress(line: str, share: float) -> None:
        notify(LoadProgress(f"{title}: {line}", share))

    with ExitStack() as stack:
        stack.callback(process.stop, LOADING_GRACE_S)
        notify(Notice(f"{title} starts with {choice.name}, process {process.pid}; its log: {log}"))
        process.wait(progress, patience or LoadPatience(), cancelled)
        stack.pop_all()
    return process


def program_of(program: Program, user: Settings) -> Path:
    """The program to start: the one that the user's setting names, else the one on PATH. Of SGLang its Python.

    Raises:
        SettingsError: the setting names no program. MissingDependencyError: there is none.
    """
    how = launching_of(program)
    own = user.own_programs.get(program)
    if own is not None:
        path = Path(own).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise SettingsError(f"{variable_of(program)}={own!r} is no program", f"give the path of {how.wanted}")
        return path.absolute()
    found = child_process.find_program(how.on_path)
    if found is None:
        title = PROGRAMS[program].title
        what = title if how.on_path == program else f"{how.on_path} of {title}"
        raise MissingDependencyError(f"{what} is not on PATH", f"{how.install}; or --url of a running server")
    script = Path(os.path.realpath(found))  # PATH may reach it through a link, and its Python is beside it
    return script.with_name(how.beside) if how.beside else script


def _granted(user: Settings, command: ServerCommand, executable: Path, own: Mapping[str, str]) -> Mapping[str, str]:
    """The row's variables, this server's (``own``), and the user's token of the hub where the server downloads.

    The programs beside this one, such as a compiler's front end, come first on its PATH.
    """
    path = os.pathsep.join(filter(None, [str(executable.parent), user.environ.get("PATH", "")]))
    granted = {**command.environment, "PATH": path, "PYTHONUNBUFFERED": "1", **own}
    return granted | ({"HF_TOKEN": user.hub.token} if command.fetched and user.hub.token else {})


def _free_endpoint() -> ServerEndpoint:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return ServerEndpoint(f"http://{HOST}:{free.getsockname()[1]}")


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
