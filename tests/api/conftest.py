"""A real server on a free loopback port, with scripted sessions behind it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dflash_local.api import request_body
from dflash_local.api.app import guarded_app
from dflash_local.api.endpoint import Endpoint
from dflash_local.api.guard import Rules
from dflash_local.api.log import send_lines_to
from dflash_local.api.metrics import Metrics
from dflash_local.api.server import ApiServer, listen
from dflash_local.service.backend import Backend as Session
from dflash_local.service.backend import Find, Model
from dflash_local.service.service import Service
from tests.service.scripted import ScriptedSession

RULES = Rules()
LIMIT_S = 60.0  # only what fails waits so long, whatever else the machine does
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@dataclass(slots=True)
class Answered:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The objects of a stream; its end as the text ``[DONE]``."""
        frames = [frame for frame in self.body.decode().split("\n\n") if frame.startswith("data: ")]
        return [frame[6:] if frame[6:] == "[DONE]" else json.loads(frame[6:]) for frame in frames]

    @property
    def text(self) -> str:
        """All content of a chat stream."""
        deltas = [event["choices"][0]["delta"] for event in self.events if event != "[DONE]" and event.get("choices")]
        return "".join(delta.get("content") or "" for delta in deltas)


@dataclass(slots=True)
class Running:
    """A server under test."""

    port: int
    server: ApiServer
    endpoint: Endpoint
    service: Service
    thread: threading.Thread

    def connect(self, timeout: float = LIMIT_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def raw(self, data: bytes = b"", timeout: float = LIMIT_S) -> socket.socket:
        """A bare connection on which ``data`` was sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout)
        sock.sendall(data)
        return sock

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answered:
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answered:
        return self.call("GET", path, headers=headers)

    def chat(self, text: str = "hi", headers: dict[str, str] | None = None, **fields: Any) -> Answered:
        return self.call("POST", "/v1/chat/completions", body(text, **fields), headers)

    def end(self) -> None:
        self.server.end()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "the server did not end"


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}


def read_all(sock: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    parts = []
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def set_read_s(server: Running, seconds: float) -> None:
    """How long requests may take to arrive, from the next one on."""
    protocol: Any = server.server.config.http_protocol_class
    protocol.read_s = seconds


Serve = Callable[..., Running]


def _start(
    *sessions: Session,
    rules: Rules = RULES,
    read_s: float = 15.0,
    grace_s: float = 0.0,
    quiet_s: float = 10.0,
    keep_alive_s: float | None = None,
    model: Callable[[Model], Model] = lambda model: model,
    more: tuple[Any, ...] = (),
    find: Find | None = None,
    models: Callable[[], tuple[str, ...]] = tuple,
) -> Running:
    left = list(sessions)

    def load(_progress: object) -> Session:
        return left.pop(0) if left else ScriptedSession()

    metrics = Metrics()
    service = Service(
        model(Model("scripted", load, aliases=("toy",), call_format="hermes")), find, keep_alive_s, metrics.observe
    )
    endpoint = Endpoint(service, metrics, models, quiet_s)
    sock = listen("127.0.0.1", 0)
    server = ApiServer(guarded_app(endpoint, rules, more), endpoint, read_s, grace_s)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    return Running(sock.getsockname()[1], server, endpoint, service, thread)


def _stop(running: Running) -> None:
    running.service.close()
    running.end()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(session, ...)`` starts a server; several sessions are given to one load after the other."""
    started: list[Running] = []

    def start(*sessions: Session, **more: Any) -> Running:
        started.append(_start(*sessions, **more))
        return started[-1]

    yield start
    for running in started:
        _stop(running)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the server writes down, of fields that it takes without effect as if it had met none before."""
    request_body._write_once.cache_clear()
    written: list[str] = []
    stop = send_lines_to(written.append)
    yield written
    stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose session answers ``Hello, world!`` to everything."""
    running = _start()
    yield running
    _stop(running)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """The same, and it asks for a token."""
    running = _start(rules=Rules(token="correct-horse-battery"))
    yield running
    _stop(running)
