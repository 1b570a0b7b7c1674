"""A request's receipt and the stream of answers: no window is told of a request that it could miss the answer to."""

from __future__ import annotations

import http.client
import importlib
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from dflash_local.ui.web.streams import LAST_WORD, RECEIPT_PATH, STREAM_PATH
from tests.ui.web.stand import Site, site

mount = importlib.import_module("dflash_local.ui.web.mount")
LIMIT_S = 10


@pytest.fixture(scope="module")
def here() -> Iterator[Site]:
    """A page that nobody looks at."""
    with site() as running:
        yield running


def asked(here: Site, window: str) -> str:
    """Have the pairs listed for a window; the number of the request, as its receipt says."""
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/config")
        functions = json.loads(connection.getresponse().read())["dependencies"]
        number = next(one["id"] for one in functions if one["api_name"] == "models")
        body = json.dumps({"data": [], "fn_index": number, "session_hash": window})
        connection.request("POST", RECEIPT_PATH, body, {"Content-Type": "application/json"})
        return str(json.loads(connection.getresponse().read())["event_id"])
    finally:
        connection.close()


def listened(here: Site, window: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, str]:
    """A window's stream up to its last word, and what was said; the stream is not hung up."""
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=LIMIT_S)
    connection.request("GET", f"{STREAM_PATH}?session_hash={window}")
    stream = connection.getresponse()
    said = ""
    while LAST_WORD.decode() not in said:
        said += stream.readline().decode()
    return connection, stream, said


def test_no_receipt_comes_before_the_last_stream_is_hung_up(here: Site) -> None:
    first = asked(here, "one")
    connection, stream, said = listened(here, "one")
    assert first in said
    receipts: list[str] = []
    waiting = threading.Thread(target=lambda: receipts.append(asked(here, "one")))
    waiting.start()
    assert asked(here, "two"), "other windows need not wait"
    assert asked(here, "three") and receipts == []
    stream.close()
    connection.close()
    waiting.join(LIMIT_S)
    assert len(receipts) == 1
    again, rest, said = listened(here, "one")
    assert receipts[0] in said
    rest.close()
    again.close()


def test_a_window_that_never_hangs_up_holds_nothing_for_ever(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mount.Streams.stream.__globals__, "HANG_UP_S", 0.1)  # of the very class that the page uses
    asked(here, "four")
    connection, stream, _ = listened(here, "four")
    assert asked(here, "four") and stream.read().strip() == b"", "the stream ended by itself"
    connection.close()


def test_a_stream_that_waits_to_be_hung_up_does_not_hold_up_the_end_of_the_server() -> None:
    with site() as here:
        asked(here, "five")
        connection, stream, _ = listened(here, "five")
        here.server.end()
        assert stream.read().strip() == b""
        connection.close()


@pytest.mark.parametrize("path", [f"{STREAM_PATH}?session_hash=nobody", "/gradio_api/call/models/nothing"])
def test_a_stream_of_nothing_is_told_so_ends_and_is_no_fault_of_the_server(
    here: Site, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=LIMIT_S)
    connection.request("GET", path)
    assert b"404: Not Found" in connection.getresponse().read(), "whole: a cut one raises"
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200, "the connection is as good as before"
    connection.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
