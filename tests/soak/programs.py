"""The programs of a home: those that run, one of them killed, and how soon they are gone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil
import pytest

from dflash_local.app.local_process import MODULE
from tests.fake_hub import wait_until
from tests.ui.test_terminal_session import Terminal

ROUNDS = int(os.environ.get("DFLASH_ROUNDS", "2"))
ASK = "Count from 1 to 99."
SHORT, SAID = "What is 3 + 4?", "3 plus 4 is 7."
MARKS = [
    pytest.mark.slow,
    pytest.mark.needs_torch,
    pytest.mark.timeout(60 + 120 * ROUNDS),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
]


def programs(home: Path, word: str = "") -> list[psutil.Process]:
    """Those whose home is there and whose command names the word."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended, or is another user's
            its_home, command = process.environ().get("HOME", "/"), " ".join(process.cmdline())
            shell = process.name() == "sh" or "tmux" in process.name()
            if Path(its_home).is_relative_to(home) and word in command and not shell:
                found.append(process)
    return found


def kill_engine(home: Path) -> int:
    (engine,) = programs(home, MODULE)
    engine.kill()
    return engine.pid


def until_all_ended(home: Path) -> None:
    assert wait_until(lambda: not programs(home)), f"left: {programs(home)}"


@contextmanager
def terminal_of(home: Path) -> Iterator[Terminal]:
    """Within, a terminal, which may be closed there."""
    home.mkdir(exist_ok=True)
    terminal = Terminal(home, "160x50")
    try:
        yield terminal
    finally:
        with suppress(subprocess.CalledProcessError):
            terminal.tmux("kill-server")


def report(what: str, seconds: Sequence[float]) -> None:
    print(f"\n{what}: {len(seconds)} times, median {median(seconds):.2f} s, worst {max(seconds):.2f} s")
