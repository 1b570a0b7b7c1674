"""``dflash pull`` as a process: two at once, Ctrl-C, kill -9, and a session whose files are to be removed."""

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

from tests.cli.conftest import DRAFTER, TARGET, Cli
from tests.fake_hub import FakeHub, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")
ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "model.safetensors"
SIZE = 5_937_152


class Running:
    """Processes of one test, none of which outlives it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, *arguments: str, stdin: int = subprocess.DEVNULL, err: int | None = None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_local", *arguments],
            cwd=ROOT,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if err is None else err,
            start_new_session=True,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def running() -> Iterator[Running]:
    started = Running()
    yield started
    for process in started.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def slowly(hub: FakeHub, times: float = 1) -> None:
    """The weights take about twelve seconds for the next ``times`` requests."""
    hub.fault(WEIGHTS, "trickle", rate=SIZE / 12, times=times)


def under_way(hub: FakeHub, least: int = 500_000) -> bool:
    return wait_until(lambda: hub.sent(WEIGHTS) > least, 60)


def leftovers(home: Path) -> list[Path]:
    return [*(home / ".cache" / "huggingface").rglob("*.incomplete")]


def test_ctrl_c_keeps_what_is_finished(toy_hub: FakeHub, running: Running, own_home: Path) -> None:
    slowly(toy_hub)
    pull = running.start("pull", TARGET)
    assert under_way(toy_hub)
    began = time.monotonic()
    os.kill(pull.pid, signal.SIGINT)
    _, err = pull.communicate(timeout=60)
    assert pull.returncode == 130 and time.monotonic() - began < 20, err
    said = err.decode()
    assert re.search(r"error: pull stopped.*finished files .* are kept", said) and "Traceback" not in said
    finished = toy_hub.gets("tokenizer.json")
    again = running.start("pull", TARGET)
    again.communicate(timeout=60)
    assert again.returncode == 0 and toy_hub.gets("tokenizer.json") == finished and not leftovers(own_home)


def test_a_terminal_shows_lines_in_place_and_is_left_clean(toy_hub: FakeHub, running: Running) -> None:
    toy_hub.fault(WEIGHTS, "trickle", rate=SIZE / 2, times=2)
    master, slave = pty.openpty()
    process = running.start("pull", TARGET, err=slave)
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


@pytest.mark.needs_torch
@pytest.mark.slow  # a process loads a pair; the refusal is held in test_rm.py and tests/store/test_removal_refused.py
def test_a_loaded_pair_is_not_removed(cli: Cli, toy_hub: FakeHub, running: Running, own_home: Path) -> None:
    assert cli("pull", TARGET).code == 0
    chat = running.start("chat", TARGET, stdin=subprocess.PIPE)
    locks = own_home / ".cache" / "dflash-local" / "locks"
    assert wait_until(lambda: len([*locks.glob("*.use.*")]) == 2, 30)
    refused = running.start("rm", TARGET, "--yes")
    _, err = refused.communicate(timeout=30)
    assert refused.returncode == 1 and f"in use by process {chat.pid}".encode() in err
    chat.communicate(b"/quit\n", timeout=60)
    removed = running.start("rm", TARGET, "--yes")
    out, err = removed.communicate(timeout=30)
    assert removed.returncode == 0 and b"7.4 MiB freed" in out, err
    assert not [*(own_home / ".cache" / "huggingface" / "hub").glob("models--*")]
