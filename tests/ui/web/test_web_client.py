"""The named endpoints, driven by Gradio's own client against the real server."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.scripted import HELLO, ScriptedSession
from tests.ui.web.stand import Site, program, site, wait_until
from tests.ui.web.test_chat_tab import said


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Site, ScriptedSession, Any]]:
    """One server, its session and a client for all tests of this file."""
    pytest.importorskip("gradio_client")
    session = ScriptedSession()
    with site(session) as here:
        client = program(here)
        yield here, session, client
        client.close()


@pytest.fixture
def client(shared: tuple[Site, ScriptedSession, Any]) -> Any:
    """The client, with the session as new."""
    session = shared[1]
    session.steps, session.gate = HELLO, None
    session.requests.clear()
    return shared[2]


def test_the_endpoints_are_named_typed_and_described(client: Any) -> None:
    api = client.view_api(return_format="dict")
    assert {"/chat", "/stop", "/race"} <= set(api["named_endpoints"])
    assert api["unnamed_endpoints"] == {}, "what the page itself calls has no name"
    chat = api["named_endpoints"]["/chat"]
    names = [parameter["parameter_name"] for parameter in chat["parameters"]]
    assert names[:4] == ["message", "history", "system", "temperature"] and "request" not in names
    assert [one["parameter_name"] for one in chat["parameters"] if not one["parameter_has_default"]] == ["message"]
    assert chat["description"].startswith("Reply to a message.")
    assert len(chat["returns"]) == len(api["named_endpoints"]["/race"]["returns"]) == 2


def test_a_reply_streams_and_ends_with_its_figures(client: Any, shared: Any) -> None:
    session = shared[1]
    session.gate = gate = threading.Event()
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    job = client.submit("c", history, system="Be brief.", temperature=0.5, seed=7, max_tokens=9, api_name="/chat")
    wait_until(lambda: bool(session.requests))
    gate.set()
    text, figures = job.result(timeout=20)
    assert text == "Hello, world!\n" and figures["seed"] == 7 and figures["mean_acceptance_length"] == 2.5
    assert figures["stats"]["acceptance_per_position"] == [1.0, 0.5, 0.0]
    assert len(job.outputs()) > 1, "it came bit by bit"
    request = session.requests[0]
    assert [message.content for message in request.messages] == ["Be brief.", "a", "b", "c"]
    assert (request.sampling.temperature, request.limits.max_new_tokens) == (0.5, 9)


def test_a_refused_request_is_told_in_one_line(client: Any) -> None:
    for changed, words in (({"top_p": 7}, "top_p 7.0 is outside 0..1"), ({"history": [{"role": "x"}]}, "'x'")):
        with pytest.raises(Exception, match=words.replace(".", r"\.")) as caught:
            client.predict("hi", **changed, api_name="/chat")
        assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("way", ["cancel", "stop"])
def test_a_client_stops_its_reply(client: Any, shared: Any, way: str) -> None:
    here, session, _ = shared
    session.steps, session.gate = said("one ", "two "), threading.Event()
    job = client.submit("talk on", api_name="/chat")
    wait_until(lambda: job.status().code.name in ("PROCESSING", "ITERATING"))  # it has the receipt
    wait_until(lambda: here.resident.status.running == 1)
    if way == "cancel":
        job.cancel()
    else:
        assert client.predict(api_name="/stop") == 1
        assert job.result(timeout=20)[1]["reason"] == "cancelled"
    wait_until(lambda: here.resident.status.running == 0)
    session.gate.set()
    assert client.predict("again", api_name="/chat")[0] == "one two "


def test_a_client_races(client: Any) -> None:
    job = client.submit("Say hi.", seed=3, api_name="/race")
    verdict, content = job.result(timeout=20)
    assert verdict == "identical: yes" and content["seed"] == 3 and content["decode_ratio"] == 2.0
    assert content["prompt"] == "Say hi." and content["versions"]["dflash-local"]


def test_a_slow_reader_holds_nobody_up(client: Any, shared: Any) -> None:
    """Who asks and then does not read: the machine works on, and serves the next one."""
    here, session, _ = shared
    session.steps = said(*["word " * 50] * 200)
    body = json.dumps({"data": ["talk", None, "", None, None, None, None, None, None, None]}).encode()
    request = urllib.request.Request(
        f"{here.url}gradio_api/call/chat", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        event = json.load(answer)["event_id"]
    slow = socket.create_connection(("127.0.0.1", here.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    slow.sendall(f"GET /gradio_api/call/chat/{event} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    assert slow.recv(64).startswith(b"HTTP/1.1 200")
    begun = time.monotonic()
    wait_until(lambda: bool(session.requests) and here.resident.status.running == 0)
    assert time.monotonic() - begun < 5
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.load(answer)["event_id"] != event
    wait_until(lambda: len(session.requests) == 2 and here.resident.status.running == 0)
    slow.close()
