"""The server's beginning and end, and what it writes down."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_local.api.chat_completions import ChatReply
from dflash_local.api.server import listen
from dflash_local.errors import EngineError, UsageError
from dflash_local.events import Piece, Step
from tests.api.conftest import LIMIT_S, Answered, Serve, body, read_all, wait_until
from tests.service.scripted import ScriptedSession

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EACCES, "privileges"), (errno.EADDRNOTAVAIL, "cannot listen"), (errno.EADDRINUSE, "in use")],
)
def test_what_the_system_refuses_names_the_port(monkeypatch: pytest.MonkeyPatch, number: int, says: str) -> None:
    def bind(_self: socket.socket, _address: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(UsageError, match=says) as caught:
        listen("127.0.0.1", 80)
    assert "80" in caught.value.message and caught.value.exit_code == 2


@pytest.mark.parametrize("host", ["999.1.1.1", "no\x00pe", "a" * 300])
def test_a_host_that_is_none_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match="no address of this machine"):
        listen(host, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_only_works() -> None:
    try:
        sock = listen("::1", 0)
    except UsageError:
        pytest.skip("this machine has no IPv6 loopback")
    with sock:
        assert sock.family == socket.AF_INET6


def test_no_answer_waits_for_the_client_to_acknowledge_the_part_before(serve: Serve) -> None:
    """Nagle's algorithm would hold each event of a stream back for up to 40 ms."""
    server = serve()
    sock = server.raw()
    wait_until(lambda: bool(server.server.server_state.connections))
    (protocol,) = server.server.server_state.connections
    transport = protocol.transport
    assert transport is not None
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    sock.close()


def test_open_streams_get_an_error_event_and_new_requests_503(serve: Serve) -> None:
    gate = threading.Event()
    server = serve(ScriptedSession(gate=gate), grace_s=LIMIT_S)
    connection = server.connect()
    connection.request("POST", CHAT, json.dumps(body(stream=True)), {"Content-Type": "application/json"})
    begun = connection.getresponse()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.chat, "hi", stream=True) for _ in range(2)]
        wait_until(lambda: server.service.status.waiting == 2)
        server.server.end()
        wait_until(lambda: server.endpoint.draining)
        refused, health = server.chat(), server.get("/health")
        assert server.server._loop is not None
        server.server._loop.call_soon_threadsafe(server.endpoint.stop)  # as if the time were over
        got = [stream.result() for stream in waiting]
        events = Answered(begun.status, {}, begun.read()).events
    server.thread.join(LIMIT_S)
    assert not server.thread.is_alive()
    assert refused.status == 503 and refused.error["code"] == "stopping" and refused.headers["retry-after"]
    assert health.status == 503 and health.json["state"] == "stopping"
    assert begun.status == 200 and events[-2]["error"]["code"] == "stopping" and events[-1] == "[DONE]"
    assert [answer.status for answer in got] == [503, 503], "these had not begun"
    with pytest.raises(OSError):
        server.raw()


def test_replies_that_end_in_time_are_whole(serve: Serve) -> None:
    gate = threading.Event()
    server = serve(ScriptedSession(gate=gate), grace_s=LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.chat, "hi", stream=True)
        wait_until(lambda: server.service.status.running == 1)
        server.server.end()
        wait_until(lambda: server.endpoint.draining)
        gate.set()
        assert stream.result().text == "Hello, world!\n"
    server.thread.join(LIMIT_S)
    assert not server.thread.is_alive()


def test_a_client_that_does_not_read_does_not_keep_the_server_up(serve: Serve) -> None:
    big = tuple(Step((Piece("x" * 50_000),), (n,), 0, 0, 0, 0.01) for n in range(400))
    server = serve(ScriptedSession(steps=big))
    connection = server.connect()
    connection.request("POST", CHAT, json.dumps(body(stream=True)), {"Content-Type": "application/json"})
    connection.getresponse()
    wait_until(lambda: server.service.status.running == 0)
    server.server.end()
    server.thread.join(LIMIT_S)
    assert not server.thread.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on descriptors to set here")
@pytest.mark.parametrize(("limit", "left"), [(64, 0), (64, 8)], ids=["few", "all but taken"])
def test_more_connections_than_descriptors_wait_their_turn(limit: int, left: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.api.starved", str(limit), str(left)]
    written = tmp_path / "stderr"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": written.open("wb")}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            half_open = [socket.create_connection(("127.0.0.1", port), LIMIT_S) for _ in range(150 if not left else 40)]
            for sock in half_open:
                sock.sendall(b"GET /v1/models HTTP/1.1\r\n")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            connection.request("GET", "/health")  # those before it are cut off one after the other
            assert connection.getresponse().status == 200
            for sock in half_open:
                sock.close()
        finally:
            child.communicate(timeout=LIMIT_S)
    told = written.read_text()
    assert "Traceback" not in told and len(told) < 10_000
    assert ("Too many open files" in told) == bool(left), told


HOSTILE = "a\r\n12:00:00 info FAKE\x1b[31m\u202e\x00"


def test_the_log_has_one_clean_line_per_event_and_no_prompt(serve: Serve, lines: list[str]) -> None:
    server = serve(ScriptedSession(faults=[None, EngineError(f"dead {HOSTILE}")]))
    prompt = "SECRET-PROMPT"
    server.chat(prompt, user=HOSTILE, headers={"User-Agent": "x\x1b]0;y\x07", "X-Forwarded-For": "1.2.3.4"})
    server.chat(prompt, stream=True)
    server.call("POST", "/v1/chat/completions", {**body(prompt), "model": HOSTILE})
    server.get("/v1/models/%0d%0aFAKE%1b%5b31m?token=SECRET-QUERY")
    read_all(server.raw(b"GET /\r\n\r\n\x1b[31m garbage\r\n\r\n"))
    wait_until(lambda: len(lines) >= 6)
    assert all(line.isprintable() and line.isascii() and "\n" not in line for line in lines), lines
    whole = "\n".join(lines)
    assert "SECRET" not in whole and "1.2.3.4" not in whole
    assert sum("FAKE" in line and "/v1/models/" in line for line in lines) == 1
    assert any("POST /v1/chat/completions 200" in line for line in lines)
    assert any("404" in line for line in lines)


def test_a_fault_of_the_endpoint_itself_is_an_answer_and_a_line(
    serve: Serve, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(ChatReply, "_step", broken)
    whole, stream = server.chat(), server.chat(stream=True)
    assert whole.status == 500 and "ZeroDivisionError" in whole.error["message"]
    assert stream.events[-2]["error"]["type"] == "server_error" and stream.events[-1] == "[DONE]"
    assert any("ZeroDivisionError: oh" in line for line in lines)
    monkeypatch.undo()
    assert server.chat().status == 200
