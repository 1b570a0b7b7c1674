"""Chats that are left, connections that are cut, and four programs over one engine, DFLASH_ROUNDS times.

The demo pair. Processes are found by their home, recorded or not.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_local.app.local_process import MODULE
from tests.fake_hub import wait_until
from tests.serve_process import served
from tests.soak.load import Client, frames, streamed
from tests.soak.programs import ASK, MARKS, ROUNDS, SAID, SHORT, programs, report, terminal_of, until_all_ended
from tests.soak.requests import CHAT, LONG
from tests.ui.test_terminal_session import TMUX, Terminal
from tests.ui.web.conftest import Visitor
from tests.ui.web.test_chat_tab import BOT, USER, press, send

pytestmark = MARKS
needs_tmux = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")


@needs_tmux
@pytest.mark.parametrize(
    ("front", "keys"),
    [
        pytest.param(["--plain"], ["/quit", "Enter"], id="line chat, /quit"),
        pytest.param(["--plain"], ["C-d"], id="line chat, Ctrl-D"),
        pytest.param(["--plain"], [], id="line chat in a reply, terminal closed"),
        pytest.param([], ["C-q"], id="screen in a reply, Ctrl+Q"),
        pytest.param([], [], id="screen in a reply, terminal closed"),
    ],
)
def test_a_chat_that_is_left_takes_its_engine_along(
    home: Path, front: list[str], keys: list[str], request: pytest.FixtureRequest
) -> None:
    name, seconds = request.node.callspec.id, []
    for turn in range(ROUNDS):
        with terminal_of(home / str(turn)) as terminal:  # the last one's may still be closing
            terminal.start("chat", "demo", "--temperature", "0", "--mode", "ar", *front)
            terminal.until(lambda text: "/quit leaves" in text or "ready" in text)
            if "in a reply" in name:
                terminal.enter(ASK)
                terminal.until(lambda text: "3, 4, 5, 6" in text)
            else:
                terminal.enter(SHORT)
                terminal.until(lambda text: SAID in text and text.rstrip().endswith(">>>"))
            assert len(programs(home, MODULE)) == 1
            began = time.monotonic()
            terminal.tmux(*(["send-keys", *keys] if keys else ["kill-server"]))
            until_all_ended(home)
            seconds.append(time.monotonic() - began)
    report(f"{name}: left to no process", seconds)


def test_a_cut_connection_ends_its_reply_and_the_next_is_answered(home: Path) -> None:
    seconds = []
    with served("demo") as url:
        client = Client(url, "demo", "none")
        for turn in range(ROUNDS):
            connection, response = client.open(CHAT, client.body(LONG, mode="ar", stream=True))
            begun, _, _ = streamed(chunk for chunk, _ in zip(frames(response), range(8)))
            assert begun.startswith("1, 2"), begun
            if turn % 2:  # a reset instead of an end
                response.fp.raw._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            began = time.monotonic()
            response.close()
            connection.close()
            assert wait_until(lambda: json.loads(client.ask("/health")[1])["running"] == 0)
            seconds.append(time.monotonic() - began)
            assert client.reply(SHORT).startswith(SAID)
        aborted = re.search(r'request_success_total{.*"cancelled".*} (\d+)', client.ask("/metrics")[1].decode())
        assert aborted is not None and int(aborted[1]) == ROUNDS
        assert len(programs(home, MODULE)) == 1
    report("endpoint: connection cut to no reply running", seconds)


def squeezed(text: str) -> str:
    """Without the white space, which a terminal breaks its lines at."""
    return "".join(text.split())


def until_said(chat: Terminal, text: str) -> None:
    """Wait for a reply, and the figures behind it, then clear the conversation."""
    chat.until(lambda shown: text + "[" in squeezed(shown))
    chat.enter("/clear")
    chat.keys("C-l")
    chat.until(lambda shown: text not in squeezed(shown))


@needs_tmux
@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed: pip install gradio")
def test_two_chats_a_page_and_a_server_share_a_load_and_reply_as_alone(home: Path, visitor: Visitor) -> None:
    asks = [f"Count from {first} to 99." for first in (1, 2, 3, 4)]
    with served("demo") as url:
        alone = [squeezed(Client(url, "demo", "none").reply(ask)) for ask in asks]
    own, page, seconds = {"DFLASH_HOME": str(home / "shared")}, visitor.page, []
    with ExitStack() as stack:
        client = Client(stack.enter_context(served("demo", own)), "demo", "none")
        page.goto(stack.enter_context(served("demo", own, command="web")))
        stack.callback(page.goto, "about:blank")  # or the server would wait for its connections
        press(page, "Settings")
        page.get_by_label("Temperature").first.fill("0")
        chats = [stack.enter_context(terminal_of(home / name)) for name in ("one", "two")]
        for chat in chats:
            chat.enter(f"export DFLASH_HOME={own['DFLASH_HOME']}")
            chat.start("chat", "demo", "--temperature", "0", "--plain")
            chat.until(lambda text: "/quit leaves" in text)
        for _ in range(ROUNDS):
            began = time.monotonic()
            for chat, ask in zip(chats, asks):
                chat.enter(ask)
            send(page, asks[2])
            assert squeezed(client.reply(asks[3])) == alone[3]
            assert wait_until(lambda: squeezed(page.locator(BOT).inner_text()) == alone[2])
            for chat, text in zip(chats, alone):
                until_said(chat, text)
            seconds.append(time.monotonic() - began)
            assert len(programs(home, MODULE)) == 1
            press(page, "Clear")
            page.locator(USER).first.wait_for(state="detached")
    report("four programs at once: asked to all answered", seconds)
