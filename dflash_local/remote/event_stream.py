"""A streamed answer (server-sent events), read by a thread of its own so that waiting for it can be given up."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dflash_local import terminal
from dflash_local.errors import ServerError
from dflash_local.events import Notice
from dflash_local.remote.endpoint import CONNECT_S, MAX_ANSWER, Endpoint, error_message, reason_of

POLL_S = 0.05
MAX_LINE = 4 * 2**20  # bytes of one event; a delta has some hundred
MAX_REPLY = 512 * 2**20  # of one answer; a token makes an event of up to a thousand
SHOWN = 60  # characters of a line that is no event
FIELDS = (b"event", b"id", b"retry", b"")  # of server-sent events, besides data; an empty one is a comment


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may take, in seconds.

    Attributes:
        first: to its first event: other requests and a long prompt may come before it. silence: between two events.
        notice: after so long without a first event a line says that it is waited for.
    """

    first: float = 600.0
    silence: float = 120.0
    notice: float = 10.0


PATIENCE = Patience()


class EventStream:
    """One POST request and the events of its answer.

    Raises (while its events are read):
        DFlashError: the request was refused. ServerError: the server is gone, or silent for too long.
    """

    def __init__(self, endpoint: Endpoint, path: str, body: Mapping[str, Any], patience: Patience) -> None:
        self._endpoint, self._patience = endpoint, patience
        self._lines: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, args=(path, body), name="dflash-stream", daemon=True)
        self._thread.start()

    def events(self, cancelled: Callable[[], bool]) -> Iterator[dict[str, Any] | Notice]:
        """The JSON objects of the answer, and what the user should know; ends with the answer, or when cancelled."""
        reported = False
        for line in self._received(cancelled):
            if isinstance(line, Notice):
                yield line
                continue
            name, _, value = line.strip().partition(b":")
            if name in FIELDS:
                continue
            if name == b"data" and value.strip() == b"[DONE]":
                return
            content = _object(value) if name == b"data" else None
            if content is not None:
                yield content
            elif not reported:
                reported = True
                shown = terminal.safe_line(line.decode("utf-8", "replace").strip())[:SHOWN]
                yield Notice(f"the server sent what is no event, which is left out: {shown}", "warning")

    def close(self) -> None:
        """Hang up, which ends the request at the server as well."""
        self._closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _received(self, cancelled: Callable[[], bool]) -> Iterator[bytes | Notice]:
        """The lines as they come."""
        since, begun, noticed = time.monotonic(), False, False
        while not cancelled():
            try:
                line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                waited = time.monotonic() - since
                if waited > (self._patience.silence if begun else self._patience.first):
                    when = "in the middle of a reply" if begun else "and has not begun the reply"
                    raise ServerError(
                        f"the server at {self._endpoint.url} is silent for {waited:.0f} s {when}",
                        "the request was given up; the next message asks it again",
                    ) from None
                if not begun and not noticed and waited > self._patience.notice:
                    noticed = True
                    yield Notice(f"waiting for the first token of the server at {self._endpoint.url}")
                continue
            if isinstance(line, Exception):
                raise line
            if not line:
                return
            since, begun = time.monotonic(), True
            yield line

    def _read(self, path: str, body: Mapping[str, Any]) -> None:
        """Put the answer's lines into the queue, then what ended it: an empty line or an error."""
        connection = self._endpoint.connection(CONNECT_S)
        begun = False
        try:
            connection.connect()
            self._socket = connection.sock
            connection.sock.settimeout(self._patience.first + self._patience.silence)
            if self._closed:
                return
            response = self._endpoint.send(connection, "POST", path, body)
            if response.status != http.client.OK:
                self._lines.put(self._endpoint.refusal(response.status, response.read(MAX_ANSWER)))
                return
            begun = True
            size = 0
            while line := response.readline(MAX_LINE + 1):
                size += len(line)
                if len(line) > MAX_LINE or size > MAX_REPLY:
                    raise ValueError("it sends without end")
                self._lines.put(line)
            self._lines.put(b"")
        except (OSError, http.client.HTTPException, ValueError) as error:
            lost = broken_off(self._endpoint.url, reason_of(error)) if begun else self._endpoint.unreachable(error)
            self._lines.put(lost)
        finally:
            connection.close()


def broken_off(url: str, reason: str) -> ServerError:
    """The error of an answer that ended before its end."""
    return ServerError(
        f"the server at {url} broke off in the middle of the reply: {reason}",
        "what came is kept; the next message asks it again",
    )


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def stream_error(content: Mapping[str, Any]) -> str:
    """The message of an event that reports an error; empty for any other event."""
    if content.get("error") is None and content.get("object") != "error":
        return ""
    return error_message(json.dumps(content).encode()) or "without a message"
