"""Chats, page and endpoint whose engine is killed in the middle of a reply, DFLASH_ROUNDS times.

The demo pair, without drafting so that a reply lasts. Processes are found by their home, recorded or not.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from dflash_local.app.local_process import MODULE
from tests.serve_process import served
from tests.soak.load import Client, frames, streamed
from tests.soak.programs import (
    ASK,
    MARKS,
    ROUNDS,
    SAID,
    SHORT,
    kill_engine,
    programs,
    report,
    terminal_of,
    until_all_ended,
)
from tests.soak.requests import CHAT, LONG
from tests.ui.test_terminal_session import TMUX
from tests.ui.web.conftest import Visitor
from tests.ui.web.test_chat_tab import BOT, USER, press, send, status

pytestmark = MARKS


@pytest.mark.skipif(TMUX is None, reason="tmux is not installed")
@pytest.mark.parametrize("front", [pytest.param(["--plain"], id="line chat"), pytest.param([], id="screen")])
def test_a_chat_keeps_what_was_shown_and_goes_on(home: Path, front: list[str], request: pytest.FixtureRequest) -> None:
    seconds = []
    with terminal_of(home) as terminal:
        terminal.start("chat", "demo", "--temperature", "0", "--mode", "ar", *front)
        terminal.until(lambda text: "/quit leaves" in text or "ready" in text)
        for _ in range(ROUNDS):
            (engine,) = programs(home, MODULE)
            engine.nice(19)  # on a busy machine the reply must not be over before it is killed
            terminal.enter(ASK)
            terminal.until(lambda text: "3, 4, 5, 6" in text)
            engine.kill()
            began = time.monotonic()
            shown = terminal.until(lambda text: "ended (SIGKILL); the pair was loaded again" in text)
            assert f"{engine.pid} ended" in shown and "3, 4, 5, 6" in shown, shown
            terminal.enter(SHORT)
            terminal.until(lambda text: "seed" in text.partition(SAID)[2])
            seconds.append(time.monotonic() - began)
            assert len(programs(home, MODULE)) == 1
            terminal.enter("/clear")
            terminal.keys("C-l")
            terminal.until(lambda text: SAID not in text)
        terminal.enter("/quit")
        until_all_ended(home)
    report(f"{request.node.callspec.id}: killed to the next reply", seconds)


@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed: pip install gradio")
def test_the_page_keeps_what_was_shown_and_goes_on(home: Path, visitor: Visitor) -> None:
    page, seconds = visitor.page, []
    with served("demo", command="web") as url:
        page.goto(url)
        press(page, "Settings")
        page.get_by_label("Temperature").first.fill("0")
        page.get_by_label("plain", exact=True).check()
        for _ in range(ROUNDS):
            send(page, ASK)
            page.locator(BOT).get_by_text("3, 4, 5, 6").wait_for()
            pid = kill_engine(home)
            began = time.monotonic()
            status(page, f"{pid} ended (SIGKILL); the pair was loaded again")
            assert "3, 4, 5, 6" in page.locator(BOT).inner_text()
            send(page, SHORT)
            page.locator(BOT).get_by_text(SAID).wait_for()
            status(page, "seed")  # it has ended: before, Gradio would drop what is sent after Clear
            seconds.append(time.monotonic() - began)
            assert len(programs(home, MODULE)) == 1
            press(page, "Clear")
            page.locator(USER).first.wait_for(state="detached")
        page.goto("about:blank")  # or the server would wait for its connections
    assert visitor.foreign == [] and visitor.complaints == []
    report("page: killed to the next reply", seconds)


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
            assert client.reply(SHORT).startswith(SAID)
            seconds.append(time.monotonic() - began)
            assert len(programs(home, MODULE)) == 1
    report("endpoint: killed to the next reply", seconds)
