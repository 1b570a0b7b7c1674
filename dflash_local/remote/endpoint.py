"""The address of a server (of another program, or another dflash process), and single HTTP exchanges with it.

Follows no redirect, uses no proxy and decompresses nothing: the token goes to the address that was given, and nowhere
else. Every answer is bounded in time and size, whatever the server sends.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dflash_local import terminal
from dflash_local.errors import BusyError, DFlashError, Interrupted, ServerError, SettingsError, UsageError

TOKEN_VARIABLE = "DFLASH_ENGINE_TOKEN"
CONNECT_S = 5.0
ANSWER_S = 10.0
POLL_S = 0.05
MAX_ANSWER = 4 * 2**20  # bytes of an answer, or of a line of one; a /metrics page of a large server has some 100,000
BLOCK = 64 * 2**10  # bytes read at once: chunks of a byte take eighty times their size until they are joined
MAX_REPLY = 512 * 2**20  # of an answer in lines; a token makes an event of up to a thousand
MAX_AHEAD = 8  # lines that are read before they are wanted
MAX_MESSAGE = 300  # characters of a server's own words in one line
# What a failed exchange raises; OverflowError: a chunk of more bytes than can be counted.
FAILURES = (OSError, http.client.HTTPException, ValueError, OverflowError)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long an answer is waited for: until this time of ``time.monotonic``, or until it is cancelled."""

    until: float
    cancelled: Callable[[], bool] = lambda: False


def within(seconds: float, cancelled: Callable[[], bool] = lambda: False) -> Wait:
    """Wait so many seconds from now on."""
    return Wait(time.monotonic() + seconds, cancelled)


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """Where a server listens.

    Attributes:
        url: without ``/v1`` and without a slash at its end.
    """

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def in_the_clear(self) -> bool:
        """True where the token travels unencrypted to another machine."""
        parts = urlsplit(self.url)
        return self.token is not None and parts.scheme == "http" and not _is_loopback(parts.hostname or "")

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=timeout_s)

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        """Send a request and wait for the head of its answer, whatever its status.

        Raises:
            OSError, http.client.HTTPException: there is none.
        """
        headers = {"Accept": "*/*"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        path = urlsplit(self.url).path + path
        connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        return connection.getresponse()

    def fetch(self, method: str, path: str, wait: Wait, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of a whole answer.

        Raises:
            ServerError: nobody answers, or too late, or without an end. Interrupted: cancelled.
        """
        with closing(Exchange(self, method, path, body)) as exchange:
            try:
                status, content = exchange.next(wait), exchange.next(wait)
            except FAILURES as error:
                raise self.unreachable(error) from error
        if not isinstance(status, int) or not isinstance(content, bytes):
            if wait.cancelled():
                raise Interrupted("interrupted")
            raise self.unreachable(TimeoutError())
        if len(content) > MAX_ANSWER:
            raise ServerError(f"the server at {self.url} sends more than {MAX_ANSWER >> 20} MiB for {path}")
        return status, content

    def get(self, path: str, wait: Wait | None = None) -> tuple[int, bytes]:
        """See ``fetch``; waits ``ANSWER_S`` if not told otherwise."""
        return self.fetch("GET", path, wait or within(ANSWER_S))

    def get_object(self, path: str, wait: Wait | None = None) -> dict[str, Any] | None:
        """The JSON object at a path, see ``get``; None where the server has none there. A list is its ``entries``.

        Raises:
            ServerError: nobody answers, or with an error, or the token is refused. BusyError: it is still loading.
            Interrupted: cancelled.
        """
        status, body = self.get(path, wait)
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN) or status >= http.client.INTERNAL_SERVER_ERROR:
            raise self.refusal(status, body)
        content = _parsed(body) if status == http.client.OK else None
        return {"entries": content} if isinstance(content, list) else content if isinstance(content, dict) else None

    def post(self, path: str, body: Mapping[str, Any], wait: Wait) -> dict[str, Any] | None:
        """The JSON object that answers a body, see ``fetch``; None where the server has none for it."""
        status, content = self.fetch("POST", path, wait, body)
        return read_object(content) if status == http.client.OK else None

    def unreachable(self, error: Exception) -> ServerError:
        """The error for a server that does not answer at all."""
        return ServerError(
            f"no server answers at {self.url}: {reason_of(error)}",
            "start it, wait until it has loaded its model, or correct --url",
        )

    def refusal(self, status: int, body: bytes) -> DFlashError:
        """The error that an answer of another status than 200 means."""
        message = error_message(body)
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            have = "refuses the token" if self.token else "wants a token"
            return ServerError(f"the server at {self.url} {have} (status {status})", f"put it into {TOKEN_VARIABLE}")
        if status == http.client.NOT_FOUND:
            return ServerError(
                f"the server at {self.url} no longer has what was asked of it: {message or 'not found'}",
                "it may have been restarted with another model: begin again",
            )
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY):
            return UsageError(f"the server at {self.url} refuses the request: {message or f'status {status}'}")
        if status in (http.client.TOO_MANY_REQUESTS, http.client.SERVICE_UNAVAILABLE):
            return BusyError(f"the server at {self.url} is busy (status {status}): {message}".rstrip(": "), "try again")
        line = f"the server at {self.url} answers with status {status}: {message}".rstrip(": ")
        return ServerError(line, "its log has the reason; the next message asks it again")


class Exchange:
    """One request and its answer, read by a thread of its own, so that waiting for it can be given up at any time."""

    def __init__(
        self,
        endpoint: ServerEndpoint,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        lines: bool = False,
    ) -> None:
        """Send the request.

        Args:
            lines: a successful answer comes line by line.
        """
        self._endpoint, self._lines = endpoint, lines
        self._read: queue.Queue[int | bytes | Exception] = queue.Queue(MAX_AHEAD)
        self._socket: socket.socket | None = None
        self._closed = False
        threading.Thread(target=self._run, args=(method, path, body), name="dflash-exchange", daemon=True).start()

    def next(self, wait: Wait) -> int | bytes | None:
        """The status, then the body, or its next line (empty at the end). None: cancelled, or nothing came in time.

        Raises:
            FAILURES: there is no answer, or no end of it.
        """
        while not wait.cancelled() and (left := wait.until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                found = self._read.get(timeout=min(POLL_S, left))
                if isinstance(found, Exception):
                    raise found
                return found
        return None

    def close(self) -> None:
        """Hang up, which ends the request at the server as well."""
        self._closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(queue.Empty):  # the thread may wait for room
            while True:
                self._read.get_nowait()

    def _run(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        connection = self._endpoint.connection(CONNECT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            connection.sock.settimeout(None)
            if self._closed:
                return
            response = self._endpoint.send(connection, method, path, body)
            self._put(response.status)
            if not self._lines or response.status != http.client.OK:
                content = bytearray()
                while not self._closed and len(content) <= MAX_ANSWER and (data := response.read(BLOCK)):
                    content += data
                self._put(bytes(content))
                return
            size = 0
            while not self._closed and (line := response.readline(MAX_ANSWER + 1)):
                size += len(line)
                if len(line) > MAX_ANSWER or size > MAX_REPLY:
                    raise ValueError("it sends without end")
                self._put(line)
            self._put(b"")
        except FAILURES as error:
            self._put(error)
        finally:
            connection.close()

    def _put(self, found: int | bytes | Exception) -> None:
        if not self._closed:
            self._read.put(found)


def endpoint(url: str, token: str | None = None) -> ServerEndpoint:
    """The endpoint behind an address as users give it; ``/v1`` at its end may stand or not.

    Raises:
        UsageError: it is no address of a server. SettingsError: the token is none that HTTP can carry.
    """
    hint = "give one such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise UsageError(f"--url {url!r} is not the address of a server", hint) from None
    if "@" in parts.netloc:
        raise UsageError("--url holds a user name or a password", f"put a token into {TOKEN_VARIABLE} instead")
    plain = url.isprintable() and " " not in url.strip() and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
        raise UsageError(f"--url {url!r} is not the address of a server", hint)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    token = (token or "").strip() or None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise SettingsError(f"{TOKEN_VARIABLE} holds characters that no token has", "copy it again")
    return ServerEndpoint(SplitResult(parts.scheme, parts.netloc, path, "", "").geturl(), token)


def reason_of(error: Exception) -> str:
    """Why a connection failed, in a few safe words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was closed"
    named = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return terminal.safe_line(str(named))[:MAX_MESSAGE]


def error_message(body: bytes) -> str:
    """What a server writes about its error, on one safe line; empty where it writes nothing readable.

    vLLM wraps the message in ``error`` (``{"error": {"message": ..., "type": ..., "code": 404}}``); SGLang, and vLLM
    before 0.11, answer ``{"object": "error", "message": ...}``; FastAPI itself ``{"detail": ...}``.
    """
    return message_of(_parsed(body))


def message_of(content: Any) -> str:
    """See ``error_message``, of JSON that is read."""
    found = content.get("error", content) if isinstance(content, dict) else content
    message = found.get("message", found.get("detail")) if isinstance(found, dict) else found
    return terminal.safe_line(message)[:MAX_MESSAGE] if isinstance(message, str) else ""


def read_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object that a server sent; None where it is none, or holds text that cannot be written."""
    content = _parsed(text)
    return content if isinstance(content, dict) else None


def _parsed(text: bytes) -> Any:
    try:
        content = json.loads(text.decode())
        if b"\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # fails on half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return content


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
