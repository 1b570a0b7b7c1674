"""A request's receipt and the stream of answers: no window is told of a request that it could miss the answer to."""

from __future__ import annotations

import http.client
import importlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_local.ui.web.streams import STREAM_PATH
from tests.service.scripted import ScriptedSession
from tests.ui.web.stand import LIMIT_S, Site, join, listen_to, site, wait_until
from tests.ui.web.test_chat_tab import said

mount = importlib.import_module("dflash_local.ui.web.mount")


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """A page that nobody looks at."""
    with site() as running:
        yield running


def test_no_receipt_comes_before_the_last_stream_is_hung_up(here: Site) -> None:
    first = join(here, "one", "_stop")
    connection, stream, said = listen_to(here, "one")
    assert first in said
    receipts: list[str] = []
    waiting = threading.Thread(target=lambda: receipts.append(join(here, "one", "_stop")))
    waiting.start()
    assert join(here, "two", "_stop"), "other windows need not wait"
    assert join(here, "three", "_stop") and receipts == []
    stream.close()
    connection.close()
    waiting.join(LIMIT_S)
    assert len(receipts) == 1
    again, rest, said = listen_to(here, "one")
    assert receipts[0] in said
    rest.close()
    again.close()


def test_a_window_that_never_hangs_up_holds_nothing_for_ever(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mount.Streams.stream.__globals__, "HANG_UP_S", 0.1)  # of the very class that the page uses
    join(here, "four", "_stop")
    connection, stream, _ = listen_to(here, "four")
    assert join(here, "four", "_stop") and stream.read().strip() == b"", "the stream ended by itself"
    connection.close()


def test_a_stream_that_waits_to_be_hung_up_does_not_hold_up_the_end_of_the_server() -> None:
    with site() as here:
        join(here, "five", "_stop")
        connection, stream, _ = listen_to(here, "five")
        here.server.end()
        assert stream.read().strip() == b""
        connection.close()


def test_a_stream_of_nothing_ends_and_is_no_fault_of_the_server(here: Site, caplog: pytest.LogCaptureFixture) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=LIMIT_S)
    connection.request("GET", f"{STREAM_PATH}?session_hash=nobody")
    assert b"404: Not Found" in connection.getresponse().read(), "whole: a cut one raises"
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200, "the connection is as good as before"
    connection.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_slow_reader_holds_nobody_up() -> None:
    """Who asks and then does not read: the machine works on, and serves the next one."""
    session = ScriptedSession()
    session.steps = said(*["word " * 50] * 200)
    asked = ("talk", "", "dflash", False, "drop", "", "", "", "", "")
    with site(session) as here:
        join(here, "slow", "_send", *asked)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", here.port))
        slow.sendall(f"GET {STREAM_PATH}?session_hash=slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert slow.recv(64).startswith(b"HTTP/1.1 200")
        begun = time.monotonic()
        wait_until(lambda: bool(session.requests) and here.service.status.running == 0)
        assert time.monotonic() - begun < 30
        join(here, "next", "_send", *asked)
        wait_until(lambda: len(session.requests) == 2 and here.service.status.running == 0)
        slow.close()
