"""``dflash pull`` as a process: Ctrl-C, and lines on a terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.planner.cpu_probe import CpuRates, add, this_cpu
from dflash_local.store.paths import speeds_folder
from tests.cli.conftest import DRAFTER, TARGET
from tests.fake_hub import FakeHub, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")
ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "model.safetensors"
SIZE = 5_937_152


class Running:
    """Processes of one test, none of which outlives it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def pull(self, err: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_local", "pull", TARGET],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            start_new_session=True,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def running(own_home: Path) -> Iterator[Running]:
    """The CPU's speed is known, or each pull would measure it for seconds."""
    user = settings.load()
    add(speeds_folder(user), CpuRates(this_cpu(user.environ), {1: 20e9, 8: 8e9, 16: 7e9}))
    started = Running()
    yield started
    for process in started.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def leftovers(home: Path) -> list[Path]:
    return [*(home / ".cache" / "huggingface").rglob("*.incomplete")]


def test_ctrl_c_keeps_what_is_finished(toy_hub: FakeHub, running: Running, own_home: Path) -> None:
    toy_hub.fault(WEIGHTS, "trickle", rate=SIZE / 12)
    pull = running.pull()
    assert wait_until(lambda: toy_hub.sent(WEIGHTS) > 100_000, 60)
    began = time.monotonic()
    os.kill(pull.pid, signal.SIGINT)
    _, err = pull.communicate(timeout=60)
    assert pull.returncode == 130 and time.monotonic() - began < 20, err
    said = err.decode()
    assert re.search(r"error: pull stopped.*finished files .* are kept", said) and "Traceback" not in said
    finished = toy_hub.gets("tokenizer.json")
    again = running.pull()
    again.communicate(timeout=60)
    assert again.returncode == 0 and toy_hub.gets("tokenizer.json") == finished and not leftovers(own_home)


def test_a_terminal_shows_lines_in_place_and_is_left_clean(toy_hub: FakeHub, running: Running) -> None:
    toy_hub.fault(WEIGHTS, "trickle", rate=SIZE, times=2)
    master, slave = pty.openpty()
    process = running.pull(err=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    codes = set(re.findall(r"\x1b\[[0-9;?]*[A-Za-z]", text))
    assert codes <= {"\x1b[3A", "\x1b[K", "\x1b[J"} and "\x1b[3A" in codes
    last = text.rsplit("\x1b[3A", 1)[-1]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", last).splitlines()
    assert [line.split()[0] for line in lines[:3]] == [TARGET, DRAFTER, "total"]
    assert all("100%" in line for line in lines[:3]) and text.endswith("\x1b[J")
    assert re.search(r"total .*MiB/s  \d+ s left", text)
    board = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text[text.index("\x1b[K") :])
    assert max(len(line.strip()) for line in board.splitlines()) < 100
