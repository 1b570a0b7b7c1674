"""Programs that a model wrote, run in a child process that is shut off from the machine: passed, failed or timed out.

Knows limits and the child's end; how the child shuts itself off stands in ``sandbox_child.py``.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_local.bench.tasks.sandbox_child import TIMED_OUT
from dflash_local.errors import UsageError

Outcome = Literal["passed", "failed", "timed out"]
CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_RESULT = 4096
EMPTY = {"SYSTEMROOT": "C:\\Windows"} if sys.platform == "win32" else {}  # without it Python does not start there


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may take. The wall is the time that passes, the processor's what it computes."""

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_mib: int = 1024
    processes: int = 8
    file_mib: int = 16
    open_files: int = 64

    def by_name(self) -> dict[str, int]:
        """As the system calls them."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mib << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_mib << 20,
            "RLIMIT_NOFILE": self.open_files,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. ``isolation``: what shut it off; empty where it never began."""

    outcome: Outcome
    isolation: str


def run(program: str, limits: SandboxLimits = SandboxLimits()) -> Ended:
    """Run a whole program; only one that comes to its end without an exception passed.

    The child has a session, an empty folder and an empty environment of its own; the folder is removed afterwards.

    Raises:
        UsageError: no process can be started, or no folder made.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dflash-code-", ignore_cleanup_errors=True) as name:
            return _run(program, limits, Path(name))
    except OSError as error:
        raise UsageError(f"code cannot be run here: {error}", "leave --run-code out") from error


def _run(program: str, limits: SandboxLimits, home: Path) -> Ended:
    folder, result, nonce = home / "own", home / "result", secrets.token_hex(16)
    folder.mkdir(mode=0o700)
    result.touch(mode=0o600)
    asked = {"program": program, "nonce": nonce, "folder": str(folder), "result": str(result)}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=EMPTY,
        start_new_session=True,
    )
    late = False
    try:
        process.communicate(json.dumps({**asked, "limits": limits.by_name()}).encode(), timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        _end(process)
    with result.open("rb") as file:
        isolation, _, answer = file.read(MAX_RESULT).decode("utf-8", "replace").partition("\n")
    if late or process.returncode in (TIMED_OUT, -getattr(signal, "SIGXCPU", TIMED_OUT)):
        return Ended("timed out", isolation)
    return Ended("passed" if process.returncode == 0 and answer == nonce else "failed", isolation)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and what it started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def isolation() -> str:
    """What shuts programs off on this machine, found out by running one.

    Raises:
        UsageError: none can be run.
    """
    found = run("pass")
    if found.outcome != "passed":
        raise UsageError("code cannot be run here: an empty program does not come to its end", "leave --run-code out")
    return found.isolation
