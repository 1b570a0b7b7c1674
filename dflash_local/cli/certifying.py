"""A certificate made in a process of its own, so that it can be ended at any moment. Reads what that process says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any

from dflash_local.catalog.bundled import Pair
from dflash_local.cli.thinking import default_thinking
from dflash_local.errors import DFlashError, EngineError, Interrupted
from dflash_local.load_config import LoadConfig
from dflash_local.settings import Settings

PROGRESS = re.compile(r"(\S.*?) +(\d{1,3})%\s*")
POLL_S = 0.1
END_S = 1.0  # what a process may take to end when asked, before it is killed
COLUMNS = "160"
Hear = Callable[[str, float], None]


def command(pair: Pair, load: LoadConfig, thinking: bool, user: Settings) -> list[str]:
    """``dflash certify`` of a pair as it was loaded.

    Args:
        user: whose settings hold there, too.
    """
    argv = [sys.executable, "-m", "dflash_local", "certify", pair.name, "--json"]
    if not pair.bundled and pair.drafter is not None:
        argv += ["--drafter", str(pair.drafter)]
    argv += replace(load, draft=True).arguments(user.load_config)
    if thinking != default_thinking(pair):
        argv += ["--think" if thinking else "--no-think"]
    return argv


def run(argv: Sequence[str], environ: Mapping[str, str], hear: Hear, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Run it to its end and give back the report, also one whose verdict is a bug.

    Raises:
        Interrupted: it was cancelled; the process has ended within two seconds.
        DFlashError: it ended without a report, with the message that it left.
    """
    read, write = _pipe()
    try:
        process = subprocess.Popen(
            argv,
            env={**environ, "COLUMNS": COLUMNS, "TERM": "xterm", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=write,
            start_new_session=True,
        )
    except OSError as error:
        os.close(read)
        raise EngineError(f"the certificate could not be started: {error}", "run dflash certify yourself") from error
    finally:
        os.close(write)
    out: list[bytes] = []
    told: list[str] = []
    readers = (
        threading.Thread(target=_take, args=(process.stdout, out), daemon=True),
        threading.Thread(target=_follow, args=(read, told, hear), daemon=True),
    )
    for reader in readers:
        reader.start()
    try:
        while process.poll() is None:
            if cancelled():
                raise Interrupted("the certificate was stopped")
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    finally:
        _end(process)
        for reader in readers:
            reader.join(END_S)
    return _report(b"".join(out), told, process.returncode)


def _pipe() -> tuple[int, int]:
    """Where it says how far it is: to a terminal only, so it gets one where the system has such; else a pipe."""
    try:
        import pty
    except ImportError:  # Windows
        return os.pipe()
    try:
        return pty.openpty()
    except OSError:
        return os.pipe()


def _take(stream: IO[bytes] | None, parts: list[bytes]) -> None:
    if stream is not None:
        with stream:
            parts.append(stream.read())


def _follow(descriptor: int, told: list[str], hear: Hear) -> None:
    """Hear every line of progress, and keep the others."""
    left = b""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # how a terminal's other end says that it is closed
            data = b""
        if not data:
            break
        *lines, left = re.split(rb"[\r\n]+", left + data)
        for line in (raw.decode("utf-8", "replace").strip() for raw in lines):
            found = PROGRESS.fullmatch(line)
            if found is not None:
                hear(found[1], min(int(found[2]), 100) / 100)
            elif line:
                told.append(line)
    os.close(descriptor)
    if left.strip():
        told.append(left.decode("utf-8", "replace").strip())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then end it and all that it started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def _report(out: bytes, told: Sequence[str], code: int) -> dict[str, Any]:
    """The report on stdout.

    Raises:
        DFlashError: there is none; of the kind that the process' error names.
    """
    with suppress(ValueError):
        report = json.loads(out)
        if isinstance(report, dict) and "verdict" in report:
            return report
    for line in reversed(told):
        with suppress(ValueError, KeyError, TypeError):
            error = json.loads(line)["error"]
            kinds = {kind.__name__: kind for kind in _all(DFlashError)}
            raise kinds.get(str(error["type"]), DFlashError)(str(error["message"]), str(error["hint"]))
    last = f": {told[-1]}" if told else ""
    raise EngineError(f"the certificate ended with exit code {code}{last}", "dflash certify in a terminal tells more")


def _all(kind: type[DFlashError]) -> list[type[DFlashError]]:
    return [kind, *(one for sub in kind.__subclasses__() for one in _all(sub))]
