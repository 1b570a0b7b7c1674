"""A mixed load on one ``dflash serve``: replies of every kind, clients that leave, bad requests, watchers.

Each kind of request is one method that returns the status it got; a text that is not the expected one, or a status
that does not belong to the request, is a fault. What is expected was recorded before, without drafting.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.soak.requests import BAD, CASES, CHAT, LONG, RARE, RARE_ONE_IN, WATCHED, Bad

ANSWER_S = 120.0  # a reply that takes longer than this is a hang
CUT_S = 30.0  # by then a connection that sends no whole request is closed
BUSY = 429
MAX_FAULTS = 50  # kept; all are counted
PAUSE_S = (0.0, 0.4)  # between two requests of one client


class Client:
    """Asks one server; a connection for each request, as clients without a pool do."""

    def __init__(self, url: str, model: str, token: str) -> None:
        self.port, self.model = urlsplit(url).port, model
        self._token = token

    def open(self, path: str, data: bytes | None, headers: Mapping[str, str] | None = None) -> Any:
        """The connection and its response, whose body is unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        usual = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection.request("GET" if data is None else "POST", path, data, {**usual, **(headers or {})})
        return connection, connection.getresponse()

    def ask(self, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body."""
        connection, response = self.open(path, data, headers)
        try:
            return response.status, response.read()
        finally:
            connection.close()

    def body(self, fields: Mapping[str, Any], **more: Any) -> bytes:
        """A body for this server's model."""
        return json.dumps({"model": self.model, **fields, **more}).encode()

    def reply(self, text: str) -> str:
        """The greedy reply to one message."""
        fields = {"messages": [{"role": "user", "content": text}], "temperature": 0}
        status, answer = self.ask(CHAT, self.body(fields))
        assert status == 200, answer
        return whole(json.loads(answer))[0]


def frames(lines: Any) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def whole(answer: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """What an answer said: text, calls without their names, and why it ended."""
    choice = answer["choices"][0]
    message = choice.get("message", {})
    text = choice.get("text") if "text" in choice else message.get("content")
    return text or "", _calls(message), choice["finish_reason"]


def streamed(chunks: Iterator[dict[str, Any]]) -> tuple[str, str, str | None]:
    """The same of a stream."""
    text, calls, reason = "", "", None
    for chunk in chunks:
        if "error" in chunk:
            return text, calls, f"error: {chunk['error']['message']}"
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            text += choice.get("text") or delta.get("content") or ""
            calls += _calls(delta)
            reason = choice["finish_reason"] or reason
    return text, calls, reason


def _calls(message: Mapping[str, Any]) -> str:
    parts = [call["function"] for call in message.get("tool_calls") or ()]
    return "".join((part.get("name") or "") + (part.get("arguments") or "") for part in parts)


class Load:
    """The requests and what came of them. Counts and faults are safe to read while it runs."""

    def __init__(self, client: Client, bad: Mapping[str, Bad] = BAD) -> None:
        self.client, self._bad = client, bad
        self.counts: Counter[tuple[str, str]] = Counter()  # kind and status
        self.compared = self.wrong = self.faulty = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()
        self._expected = {name: self._plain(name) for name in CASES}
        self._long = self._plain_long()
        for name in bad:  # what one of them takes for good, it has taken before anything is measured
            self._refuse(name)
        self._kinds: tuple[tuple[Callable[[random.Random], None], int], ...] = (
            (self._reply, 12),
            (self._stream, 12),
            (self._leave, 4),
            (self._refused, 6),
        )

    def work(self, number: int, until: float) -> None:
        """One client until the time is up."""
        chance = random.Random(number)
        kinds, weights = zip(*self._kinds)
        while time.monotonic() < until:
            self._guarded(chance.choices(kinds, weights)[0], chance)
            time.sleep(chance.uniform(*PAUSE_S))

    def watch(self, until: float, every_s: float) -> None:
        """What a monitor asks."""
        while time.monotonic() < until:
            for path in WATCHED:
                self._guarded(self._watched, path)
            time.sleep(every_s)

    def burst(self, until: float, every_s: float, clients: int) -> None:
        """More requests at once than may wait, now and then."""
        while time.monotonic() < until:
            threads = [
                threading.Thread(target=self._guarded, args=(self._reply, random.Random(n)), daemon=True)
                for n in range(clients)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(ANSWER_S)
            time.sleep(every_s)

    def half_open(self, until: float) -> None:
        """Connections that never send a whole request; the server ends them."""
        starts = (b"", b"POST /v1/chat", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        while time.monotonic() < until:
            for start in starts:
                self._guarded(self._unfinished, start)

    def _guarded(self, kind: Callable[[Any], None], argument: Any) -> None:
        """A request that ends in an error of the connection is a fault, too."""
        try:
            kind(argument)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self._fault(f"{kind.__name__.strip('_')}: {type(error).__name__}: {error}")

    def _count(self, kind: str, status: object) -> None:
        with self._lock:
            self.counts[kind, str(status)] += 1

    def _fault(self, what: str) -> None:
        with self._lock:
            self.faulty += 1
            if len(self.faults) < MAX_FAULTS:
                self.faults.append(what)

    def _compare(self, kind: str, said: object, expected: object) -> None:
        with self._lock:
            self.compared += 1
            self.wrong += said != expected
        if said != expected:
            self._fault(f"{kind}: {said!r:.300} instead of {expected!r:.300}")

    def _plain(self, name: str) -> tuple[str, str, str | None]:
        """What a case says without drafting.

        Raises:
            ValueError: the server does not answer it.
        """
        path, fields = CASES[name]
        status, answer = self.client.ask(path, self.client.body(fields, mode="ar"))
        if status != 200:
            raise ValueError(f"{name}: {status} {answer[:200]!r}")
        return whole(json.loads(answer))

    def _plain_long(self) -> str:
        return whole(json.loads(self.client.ask(CHAT, self.client.body(LONG, mode="ar"))[1]))[0]

    def _reply(self, chance: random.Random) -> None:
        name = chance.choice(list(CASES))
        path, fields = CASES[name]
        status, answer = self.client.ask(path, self.client.body(fields))
        self._count(name, status)
        if status == 200:
            self._compare(name, whole(json.loads(answer)), self._expected[name])
        elif status != BUSY:
            self._fault(f"{name}: {status} {answer[:200]!r}")

    def _stream(self, chance: random.Random) -> None:
        name = chance.choice(list(CASES))
        path, fields = CASES[name]
        more = {"stream_options": {"include_usage": True}} if chance.random() < 0.5 else {}
        connection, response = self.client.open(path, self.client.body(fields, stream=True, **more))
        try:
            self._count(f"{name}, stream", response.status)
            if response.status == 200:
                self._compare(f"{name}, stream", streamed(frames(response)), self._expected[name])
            elif response.status != BUSY:
                self._fault(f"{name}, stream: {response.status} {response.read(200)!r}")
        finally:
            connection.close()

    def _leave(self, chance: random.Random) -> None:
        """Leave in the middle of a stream, politely or with a reset; what was read must begin the text."""
        connection, response = self.client.open(CHAT, self.client.body(LONG, stream=True))
        kind = "leave, reset" if chance.random() < 0.5 else "leave"
        self._count(kind, response.status)
        try:
            if response.status == 200:
                chunks = frames(response)
                said, _, _ = streamed(chunk for chunk, _ in zip(chunks, range(chance.randint(1, 12))))
                self._compare(kind, said, self._long[: len(said)])
            elif response.status != BUSY:
                self._fault(f"{kind}: {response.status} {response.read(200)!r}")
            if kind == "leave, reset":
                linger = struct.pack("ii", 1, 0)
                response.fp.raw._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        finally:
            response.close()
            connection.close()

    def _refused(self, chance: random.Random) -> None:
        name = chance.choice(list(self._bad))
        if name in RARE and chance.randrange(RARE_ONE_IN):
            return
        self._refuse(name)

    def _refuse(self, name: str) -> None:
        bad = self._bad[name]
        status, answer = self.client.ask(bad.path, bad.body, dict(bad.headers))
        self._count(f"refused: {name}", status)
        if status not in (bad.status, BUSY) or b'"error"' not in answer:
            self._fault(f"refused: {name}: {status} {answer[:200]!r}, {bad.status} expected")

    def _watched(self, path: str) -> None:
        status, answer = self.client.ask(path)
        self._count(path, status)
        if status != 200:
            self._fault(f"{path}: {status} {answer[:200]!r}")

    def _unfinished(self, start: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self.client.port), CUT_S) as sock:
            sock.sendall(start)
            said = sock.recv(4096)
            self._count("half-open", "closed" if not said else said[:12].decode("latin-1"))
