"""vLLM and SGLang in virtual environments of their own under the user's data folder: made, listed, removed.

A marker is written last, so that an environment without one is unfinished and made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dflash_local import terminal
from dflash_local.checkpoint_files.json_file import read_object
from dflash_local.errors import (
    BusyError,
    CheckpointError,
    DoesNotFitError,
    DownloadError,
    Interrupted,
    SettingsError,
    UsageError,
)
from dflash_local.planner import hardware
from dflash_local.remote.server_checks import PROGRAMS, Program
from dflash_local.settings import Settings
from dflash_local.store.atomic import FILE_MODE, make_private, write_atomic
from dflash_local.tables import GIB, amount

MARKER = "installed.json"
POLL_S = 0.2
ASK_S = 30.0  # what a Python may take to say which one it is
ELSEWHERE = "install it on a machine that has one, and use --url; DFLASH_{}=PATH takes one that is here already"


@dataclass(frozen=True, slots=True)
class Release:
    """What is installed of a program.

    Attributes:
        requirement: as pip reads it. executable: in the environment's folder of programs.
        download_gib, disk_gib: with all that it needs, CUDA libraries among it; approximate.
        pythons: the first and the last minor version of Python 3 that it supports.
    """

    program: Program
    requirement: str
    executable: str
    download_gib: float
    disk_gib: float
    pythons: tuple[int, int]

    @property
    def version(self) -> str:
        """``0.32.0``."""
        return self.requirement.partition("==")[2]

    @property
    def title(self) -> str:
        """``vLLM 0.32.0``."""
        return f"{PROGRAMS[self.program]} {self.version}"


RELEASES: Mapping[Program, Release] = {
    "vllm": Release("vllm", "vllm==0.32.0", "vllm", 5.0, 11.0, (11, 14)),
    "sglang": Release("sglang", "sglang==0.5.23", "python", 6.0, 13.0, (10, 13)),
}


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment of a program.

    Attributes:
        version, python: empty where it is unfinished. bytes: on this disk.
    """

    program: Program
    folder: Path
    version: str
    python: str
    bytes: int

    @property
    def finished(self) -> bool:
        """Whether it was made to its end."""
        return bool(self.version)

    @property
    def executable(self) -> Path:
        """What starts the program; of SGLang its Python."""
        return self.folder / "bin" / RELEASES[self.program].executable

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "program": self.program,
            "version": self.version or None,
            "python": self.python or None,
            "finished": self.finished,
            "bytes": self.bytes,
            "folder": str(self.folder),
            "executable": str(self.executable),
        }


def engines_folder(user: Settings) -> Path:
    """Where environments are kept. SettingsError: there is no home folder."""
    if user.data_dir is None:
        raise SettingsError("there is no folder for programs: no home folder", "set HOME or DFLASH_HOME")
    return user.data_dir / "engines"


def installed(user: Settings) -> tuple[Installed, ...]:
    """The environments that there are, unfinished ones too."""
    if user.data_dir is None:
        return ()
    return tuple(one for name in RELEASES if (one := _installed(name, user)) is not None)


def installed_program(program: Program, user: Settings) -> Path | None:
    """What starts an installed program; None where it is not installed, or not to its end."""
    if user.data_dir is None:
        return None
    folder = engines_folder(user) / program
    path = folder / "bin" / RELEASES[program].executable
    return path if (folder / MARKER).is_file() and path.is_file() else None


def check_machine(release: Release, user: Settings, python: Path | None = None) -> Path:
    """The Python to make an environment with, where one can be made here.

    Args:
        python: another one than this program's own.

    Raises:
        UsageError: not on this machine, or not with this Python. DoesNotFitError: the disk has no room.
        DownloadError: this is offline.
    """
    name = release.program
    if sys.platform != "linux" or hardware.nvidia_driver() is None:
        found = "this machine shows none" if sys.platform == "linux" else f"this is {sys.platform}"
        raise UsageError(
            f"{release.title} is installed on Linux with an NVIDIA card, and {found}", ELSEWHERE.format(name.upper())
        )
    if user.hub.offline:
        raise DownloadError(f"{release.title} is downloaded, and this is offline", "unset HF_HUB_OFFLINE")
    chosen = Path(sys.executable) if python is None else python.expanduser().absolute()
    version = _version_of(chosen)
    first, last = release.pythons
    if not (version[0] == 3 and first <= version[1] <= last):
        raise UsageError(
            f"{release.title} supports Python 3.{first} to 3.{last}, and {chosen} is {version[0]}.{version[1]}",
            "name another with --python PATH",
        )
    there = hardware.folder(engines_folder(user))
    if there.free < release.disk_gib * GIB:
        raise DoesNotFitError(
            f"{release.title} takes about {release.disk_gib:g} GiB in {there.path}, and {amount(there.free)} are free",
            "make room, or set DFLASH_HOME to a folder on another disk",
        )
    return chosen


def install(
    release: Release,
    user: Settings,
    python: Path,
    progress: Callable[[str], None] = lambda _line: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Installed:
    """Make the environment anew and put the program into it; takes minutes. Nothing of it is left where that fails.

    Args:
        python: of ``check_machine``. progress: called with what pip is at.

    Raises:
        BusyError: another process makes or uses it. DownloadError: it failed, with pip's last line and its log.
        Interrupted: cancelled.
    """
    from dflash_local.store import lock

    folder = engines_folder(user) / release.program
    log = (user.state_dir or folder.parent) / "engines" / f"install-{release.program}.log"
    with lock.exclusive(lock.folder_of(user), f"engine/{release.program}", wait=False), ExitStack() as stack:
        _refuse_in_use(folder)
        _discard(folder)
        make_private(folder.parent)
        make_private(log.parent)
        log.unlink(missing_ok=True)
        stack.callback(_discard, folder)
        steps = _Steps(release, user, log, progress, cancelled)
        steps.run("making the environment", [str(python), "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        steps.run(f"installing {release.requirement}", [*pip, "--no-cache-dir", release.requirement])
        if not (folder / "bin" / release.executable).is_file():
            raise DownloadError(f"{release.title} was installed without its program", f"the log: {log}")
        made = {
            "program": release.program,
            "version": release.version,
            "python": ".".join(map(str, _version_of(python))),
        }
        write_atomic(folder / MARKER, json.dumps(made))
        stack.pop_all()
    found = _installed(release.program, user)
    assert found is not None
    return found


def remove(one: Installed, user: Settings) -> None:
    """Remove an environment. BusyError: it is used, or being made."""
    from dflash_local.store import lock

    with lock.exclusive(lock.folder_of(user), f"engine/{one.program}", purpose="remove", wait=False):
        _refuse_in_use(one.folder)
        _discard(one.folder)


class _Steps:
    """Programs run one after another into one log."""

    def __init__(
        self,
        release: Release,
        user: Settings,
        log: Path,
        progress: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._title, self._user, self._log = release.title, user, log
        self._progress, self._cancelled = progress, cancelled

    def run(self, what: str, argv: Sequence[str]) -> None:
        """Run one to its end, and tell what it writes meanwhile."""
        from dflash_local.remote import server_log

        environ = {**self._user.environ, "PYTHONUNBUFFERED": "1"}
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, FILE_MODE)
        try:
            process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        except OSError as error:
            raise DownloadError(f"{self._title}: {what} failed: {error}", f"the log: {self._log}") from error
        finally:
            os.close(descriptor)
        try:
            while process.poll() is None:
                if self._cancelled():
                    raise Interrupted(f"{self._title} was not installed")
                self._progress(f"{what}: {server_log.last_line(self._log)}")
                time.sleep(POLL_S)
        finally:
            _end(process)
        if process.returncode:
            raise DownloadError(
                f"{self._title}: {what} failed: {server_log.reason(self._log)}", f"the log: {self._log}"
            )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            process.terminate()
            process.wait()
        os.killpg(process.pid, signal.SIGKILL)


def _installed(program: Program, user: Settings) -> Installed | None:
    folder = engines_folder(user) / program
    if not folder.is_dir():
        return None
    try:
        made = read_object(folder / MARKER, optional=True)
    except CheckpointError:
        made = {}
    version, python = (value if isinstance(value := made.get(key), str) else "" for key in ("version", "python"))
    return Installed(program, folder, version, python, _size(folder))


def _size(folder: Path) -> int:
    """Bytes of all files, links not followed."""
    sizes = 0
    for place, _, files in os.walk(folder):
        for name in files:
            sizes += os.lstat(os.path.join(place, name)).st_size
    return sizes


def _discard(folder: Path) -> None:
    """Remove an environment, its marker first: a half-removed one is unfinished."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _refuse_in_use(folder: Path) -> None:
    """BusyError: a process runs from the environment."""
    import psutil

    beginning = f"{folder}{os.sep}"
    for process in psutil.process_iter(["cmdline"]):
        words = cast("list[str]", process.info["cmdline"] or [])
        if any(word.startswith(beginning) for word in words[:2]):
            raise BusyError(f"process {process.pid} runs from {folder}", f"end it first: kill {process.pid}")


def _version_of(python: Path) -> tuple[int, int]:
    """Major and minor version of an interpreter. UsageError: it is none."""
    script = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, timeout=ASK_S, check=True)
        major, minor = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        raise UsageError(f"{terminal.safe_line(str(python))} is no Python", "give the path of one: --python") from None
    return major, minor
