"""A certificate made in a process of its own, so that it can be ended at any moment. Reads its JSON lines."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any, NoReturn

from dflash_local import child_process
from dflash_local.app.thinking import default_thinking
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DFlashError, EngineError, Interrupted
from dflash_local.json_text import parse_json
from dflash_local.load_config import LoadConfig
from dflash_local.settings import Settings

POLL_S = 0.1
END_S = 1.0  # what a process may take to end when asked, before it is killed
Progress = Callable[[str, float], None]


def command(pair: Pair, load: LoadConfig, thinking: bool, user: Settings) -> list[str]:
    """``dflash certify`` of a pair as it was loaded.

    Args:
        user: whose settings hold there, too.
    """
    argv = ["certify", pair.name, "--json", "--json-progress"]
    if not pair.bundled and pair.drafter is not None:
        argv += ["--drafter", str(pair.drafter)]
    argv += replace(load, draft=True).arguments(user.load_config)
    if thinking != default_thinking(pair):
        argv += ["--think" if thinking else "--no-think"]
    return child_process.python_command("dflash_local", argv)


def run(
    argv: Sequence[str], environ: Mapping[str, str], progress: Progress, cancelled: Callable[[], bool]
) -> dict[str, Any]:
    """Run it to its end and give back the report, also one whose verdict is a bug.

    Raises:
        Interrupted: it was cancelled; the process has ended within two seconds.
        DFlashError: it ended without a report, with the message that it left.
    """
    try:
        process = child_process.start(
            argv,
            environ,
            {"NO_COLOR": "1"},
            child_process.USERS_FOLDER,  # the pair's name may be a folder below it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"the certificate could not be started: {error}", "run dflash certify yourself") from error
    report: dict[str, Any] = {}
    errors: list[str] = []
    readers = (
        threading.Thread(target=_follow, args=(process.stdout, report, progress), daemon=True),
        threading.Thread(target=_gather, args=(process.stderr, errors), daemon=True),
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
    return report or _raise(errors, process.returncode)


def _follow(stream: IO[bytes], report: dict[str, Any], progress: Progress) -> None:
    """Read its JSON lines: how far it is, and the report."""
    with stream:
        for line in stream:
            with suppress(ValueError, TypeError):
                content = parse_json(line)
                if "progress" in content:
                    progress(str(content["progress"]), min(float(content["fraction"]), 1.0))
                elif "verdict" in content:
                    report.update(content)


def _gather(stream: IO[bytes], lines: list[str]) -> None:
    with stream:
        lines += filter(None, (line.decode("utf-8", "replace").strip() for line in stream))


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


def _raise(errors: Sequence[str], code: int) -> NoReturn:
    """Raise the error that it left, as the class that it was."""
    for line in reversed(errors):
        with suppress(ValueError, KeyError, TypeError):
            error = parse_json(line)["error"]
            kinds = {kind.__name__: kind for kind in _all(DFlashError)}
            raise kinds.get(str(error["type"]), DFlashError)(str(error["message"]), str(error["hint"]))
    last = f": {errors[-1]}" if errors else ""
    raise EngineError(f"the certificate ended with exit code {code}{last}", "dflash certify in a terminal tells more")


def _all(kind: type[DFlashError]) -> list[type[DFlashError]]:
    return [kind, *(one for sub in kind.__subclasses__() for one in _all(sub))]
