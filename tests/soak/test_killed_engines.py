"""Line chat and endpoint whose engine is killed in the middle of a reply, DFLASH_ROUNDS times.

The demo pair, without drafting so that a reply lasts. Processes are found by their home, recorded or not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from dflash_local.app.local_process import MODULE
from tests.fake_hub import wait_until
from tests.serve_process import served
from tests.soak.load import Client, frames, streamed
from tests.soak.requests import CHAT, LONG
from tests.ui.test_terminal_session import TMUX, Terminal

ROUNDS = int(os.environ.get("DFLASH_ROUNDS", "2"))
ASK = "Count from 1 to 99."
SHORT, SAID = "What is 3 + 4?", "3 plus 4 is 7."
pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_torch,
    pytest.mark.timeout(60 + 120 * ROUNDS),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of every program of a test; none may be left."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DFLASH_IN_PROCESS")
    yield tmp_path
    assert wait_until(lambda: not programs(tmp_path)), "a process is left"


def programs(home: Path, word: str = "dflash_local") -> list[psutil.Process]:
    """Those with this home whose command names the word."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home) and word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it ended, or is another user's
            continue
    return [process for process in found if "tmux" not in process.name() and process.name() != "sh"]


def kill_engine(home: Path) -> int:
    (engine,) = programs(home, MODULE)
    engine.kill()
    return engine.pid


def report(name: str, seconds: list[float]) -> None:
    print(f"\n{name}: {len(seconds)} times, median {median(seconds):.2f} s, worst {max(seconds):.2f} s")


@pytest.mark.skipif(TMUX is None, reason="tmux is not installed")
def test_line_chat_keeps_what_was_shown_and_goes_on(home: Path) -> None:
    terminal = Terminal(home, "160x50")
    seconds = []
    try:
        terminal.start("chat", "demo", "--temperature", "0", "--mode", "ar", "--plain")
        terminal.until(lambda text: "/quit leaves" in text)
        for _ in range(ROUNDS):
            terminal.enter(ASK)
            terminal.until(lambda text: "3, 4, 5, 6" in text)
            pid = kill_engine(home)
            began = time.monotonic()
            shown = terminal.until(lambda text: "ended (SIGKILL); the pair was loaded again" in text)
            assert f"{pid} ended" in shown and "3, 4, 5, 6" in shown, shown
            terminal.enter(SHORT)
            terminal.until(lambda text: SAID in text)
            seconds.append(time.monotonic() - began)
            assert len(programs(home, MODULE)) == 1
            terminal.enter("/clear")
            terminal.keys("C-l")
            terminal.until(lambda text: SAID not in text)
        terminal.enter("/quit")
        assert wait_until(lambda: not programs(home)), "the chat does not end"
    finally:
        terminal.tmux("kill-server")
    report("line chat: killed to the next reply", seconds)


def test_the_endpoint_says_it_in_the_stream_and_answers_the_next(home: Path) -> None:
    seconds = []
    with served("demo") as url:
        client = Client(url, "demo", "none")
        for _ in range(ROUNDS):
            connection, response = client.open(CHAT, client.body(LONG, mode="ar", stream=True))
            chunks = frames(response)
            begun, _, _ = streamed(chunk for chunk, _ in zip(chunks, range(8)))
            pid = kill_engine(home)
            began = time.monotonic()
            _, _, reason = streamed(chunks)
            connection.close()
            assert begun.startswith("1, 2") and f"{pid} ended (SIGKILL)" in str(reason), (begun, reason)
            status, answer = client.ask(CHAT, client.body({"messages": [{"role": "user", "content": SHORT}]}))
            seconds.append(time.monotonic() - began)
            assert status == 200 and SAID in json.loads(answer)["choices"][0]["message"]["content"]
            assert len(programs(home, MODULE)) == 1
    report("endpoint: killed to the next reply", seconds)
