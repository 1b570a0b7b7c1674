"""The address of a server (vLLM, SGLang, or another dflash process), and single HTTP exchanges with it.

Follows no redirect and uses no proxy: the token goes to the address that was given, and nowhere else.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dflash_local import terminal
from dflash_local.errors import BusyError, DFlashError, ServerError, SettingsError, UsageError

TOKEN_VARIABLE = "DFLASH_ENGINE_TOKEN"
CONNECT_S = 5.0
ANSWER_S = 10.0
MAX_ANSWER = 16 * 2**20  # bytes; a /metrics page of a large server has some hundred thousand
MAX_MESSAGE = 300  # characters of a server's own words in one line


@dataclass(frozen=True, slots=True)
class Endpoint:
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

    def get(self, path: str, answer_s: float = ANSWER_S) -> tuple[int, bytes]:
        """Status and body of a short answer.

        Args:
            answer_s: how long it may be silent.

        Raises:
            ServerError: nobody answers, or too late, or without an end.
        """
        try:
            with closing(self.connection(answer_s)) as connection:
                response = self.send(connection, "GET", path)
                body = response.read(MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self.unreachable(error) from error
        if len(body) > MAX_ANSWER:
            raise ServerError(f"the server at {self.url} sends more than {MAX_ANSWER >> 20} MiB for {path}")
        return response.status, body

    def get_object(self, path: str, answer_s: float = ANSWER_S) -> dict[str, Any] | None:
        """The JSON object at a path, see ``get``; None where the server has none there.

        Raises:
            ServerError: nobody answers, or with an error, or the token is refused. BusyError: it is still loading.
        """
        status, body = self.get(path, answer_s)
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN) or status >= http.client.INTERNAL_SERVER_ERROR:
            raise self.refusal(status, body)
        try:
            content = json.loads(body) if status == http.client.OK else None
        except (ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) else None

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


def endpoint(url: str, token: str | None = None) -> Endpoint:
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
    return Endpoint(SplitResult(parts.scheme, parts.netloc, path, "", "").geturl(), token)


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
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    found = content.get("error", content) if isinstance(content, dict) else content
    message = found.get("message", found.get("detail")) if isinstance(found, dict) else found
    return terminal.safe_line(message)[:MAX_MESSAGE] if isinstance(message, str) else ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
