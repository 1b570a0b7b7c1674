"""What every request passes before anything looks at it: Host, Origin, token, body size, time to send it.

Pure ASGI around any app (endpoint and web page alike); knows nothing of what the requests ask for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_local.api.refusals import Refusal, as_json, error_body, error_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 8 * 2**20
MAX_HELD = 8 * MAX_BODY  # of all requests together, so that many clients cannot fill the memory
READ_S = 15.0
LINGER_S = 2.0  # for which a refused body is thrown away
LINGER_BYTES = 8 * 2**20  # of it, at most, or twice what is taken
LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
WITH_BODY = ("POST", "PUT", "PATCH")
OPEN_PATHS = frozenset(("/health",))  # no token asked: for watchers that have none
PREFLIGHT_S = 600  # for which a browser keeps the answer to what it asks before a foreign page's request
# Added where the app set nothing of the kind. CORS headers are added for the pages of ``Rules.origins`` alone.
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is let in.

    Attributes:
        hosts: names a Host header may carry, in lower case, besides the loopback ones. Any port will do:
            a page that rebinds a name of its own to this address still sends that name.
        any_address: literal addresses are fine too; no name can be rebound to one.
        token: required as ``Authorization: Bearer``, as ``x-api-key``, or as the password that a browser asks its user
            for; None requires nothing.
        origins: web pages of others that may send requests and read the answers, as browsers write them in Origin.
        read_s: seconds from the first byte of a request to the last.
    """

    hosts: frozenset[str] = frozenset()
    any_address: bool = False
    token: str | None = field(default=None, repr=False)
    origins: frozenset[str] = frozenset()
    max_body: int = MAX_BODY
    max_held: int = MAX_HELD
    read_s: float = READ_S


class _Gone(Exception):
    """The client left before its request was whole."""


class Guard:
    """Lets a request through to ``app``, with its body whole, or answers it with an error."""

    def __init__(self, app: App, rules: Rules) -> None:
        self._app, self._rules = app, rules
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        cors = self._cors(scope)
        send = _secured(send, cors)
        preflight = bool(cors) and scope["method"] == "OPTIONS" and _has(scope, b"access-control-request-method")
        body = b""
        try:
            self._check(scope, asks_token=not preflight)  # a browser sends none with it
            if preflight:
                return await _answer_preflight(scope, send)
            if scope["type"] == "http":
                body = await self._body(scope, receive)
                receive = replay(body, receive)
        except _Gone:
            return
        except Refusal as refusal:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await _refuse(refusal, scope, receive, send, self._rules)
        try:
            await self._app(scope, receive, send)
        finally:
            self._held -= len(body)

    def _cors(self, scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers by which the page of an allowed origin may read the answer, also one that refuses it."""
        origins = [value for key, value in scope["headers"] if key.lower() == b"origin"]
        if scope["type"] != "http" or len(origins) != 1 or origins[0].decode("latin-1") not in self._rules.origins:
            return ()
        return (b"access-control-allow-origin", origins[0]), (b"vary", b"Origin")

    def _check(self, scope: Scope, asks_token: bool) -> None:
        host = _header(scope, b"host")
        if not host or not self._is_ours(host):
            raise Refusal(400, "this server does not answer to that Host", "use the address that it printed")
        origin = _header(scope, b"origin")
        ours = {f"http://{host.lower()}", f"https://{host.lower()}"}
        if origin is not None and origin.lower() not in ours | self._rules.origins:
            raise Refusal(403, "requests from other web pages are refused", "the Origin is not this server's")
        if asks_token and scope["path"] not in OPEN_PATHS:
            key = _header(scope, b"x-api-key")  # as Anthropic's clients send it
            self._check_token(_header(scope, b"authorization") or (f"Bearer {key}" if key else None))

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        if name in LOOPBACK_NAMES or name in self._rules.hosts:
            return True
        return self._rules.any_address and _is_address(name)

    def _check_token(self, given: str | None) -> None:
        token = self._rules.token
        if token is None:
            return
        scheme, _, value = (given or "").partition(" ")
        value = _password(value) if scheme.lower() == "basic" else value.strip()
        same = hmac.compare_digest(_digest(value), _digest(token))
        if scheme.lower() not in ("bearer", "basic") or not same:
            raise Refusal(401, "the token is missing or wrong", "send Authorization: Bearer TOKEN", "invalid_api_key")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        if (_header(scope, b"content-encoding") or "identity").lower() != "identity":
            raise Refusal(415, "compressed bodies are refused", "send the body as it is")
        length, chunked = _header(scope, b"content-length"), _header(scope, b"transfer-encoding") is not None
        if length is None and not chunked:
            if scope["method"] in WITH_BODY:
                raise Refusal(411, "Content-Length is missing", "send one, or Transfer-Encoding: chunked")
            return b""
        if length is not None and (chunked or not (length.isascii() and length.isdigit()) or len(length) > 18):
            raise Refusal(400, "Content-Length is not a length", "send a whole number of bytes, and nothing else")
        declared = None if length is None else int(length)
        self._check_size(declared or 0, self._held + (declared or 0))
        loop = asyncio.get_running_loop()
        began_by = scope.get("state", {}).get("read_by")  # the server's clock runs since the first byte
        parts: list[bytes] = []
        whole = False
        try:
            await self._read(receive, parts, began_by or loop.time() + self._rules.read_s)
            size = sum(map(len, parts))
            if declared is not None and declared != size:
                raise Refusal(400, f"the body has {size} bytes, Content-Length says {declared}")
            whole = True
        finally:
            if not whole:
                self._held -= sum(map(len, parts))
        return b"".join(parts)

    async def _read(self, receive: Receive, parts: list[bytes], until: float) -> None:
        """Add the body's parts; their sizes are counted in ``_held`` from now on."""
        loop = asyncio.get_running_loop()
        size, more = 0, True
        while more:
            try:
                message = await asyncio.wait_for(receive(), until - loop.time())
            except asyncio.TimeoutError as error:
                raise Refusal(408, f"the request took longer than {self._rules.read_s:g} s to arrive") from error
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            parts.append(part)
            self._held += len(part)
            size, more = size + len(part), message.get("more_body", False)
            self._check_size(size, self._held)

    def _check_size(self, size: int, held: int) -> None:
        if size > self._rules.max_body:
            raise Refusal(413, f"the body is larger than {self._rules.max_body} bytes", "send less")
        if held > self._rules.max_held:
            raise Refusal(503, "too many large requests at once", "try again in a moment")


def _header(scope: Scope, name: bytes) -> str | None:
    """Return the text of a header that may stand there once; None when absent."""
    values = [value for key, value in scope["headers"] if key.lower() == name]
    if len(values) > 1:
        raise Refusal(400, f"the header {name.decode('ascii')} stands there {len(values)} times")
    return values[0].decode("latin-1").strip() if values else None


def _host_name(host: str) -> str:
    """Return ``localhost`` of ``localhost:8000``, ``::1`` of ``[::1]:8000``; empty when it is neither."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return ""
        port = port[1:]
    else:
        name, _, port = host.partition(":")
    if port and not (port.isascii() and port.isdigit()):
        return ""
    return name.lower().rstrip(".")


def _password(credentials: str) -> str:
    """Return the password of a browser's ``Basic`` credentials, whatever the name; empty when they are none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode("utf-8").partition(":")[2]
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(text: str) -> bytes:
    """Return bytes of one length whatever the text, so that comparing tells nothing of it."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body once, and then what the server says (that the client left)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _has(scope: Scope, name: bytes) -> bool:
    return any(key.lower() == name for key, _ in scope["headers"])


def _secured(send: Send, more: Sequence[tuple[bytes, bytes]]) -> Send:
    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            present = {key.lower() for key, _ in headers}
            headers += [pair for pair in (*SECURITY_HEADERS, *more) if pair[0] not in present]
            message = {**message, "headers": headers}
        await send(message)

    return secured


async def _answer_preflight(scope: Scope, send: Send) -> None:
    """Say that the request which a browser asks about may come: clients send headers of their own by the dozen."""
    asked = b", ".join(value for key, value in scope["headers"] if key.lower() == b"access-control-request-headers")
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", asked or b"Authorization, Content-Type"),
        (b"access-control-max-age", str(PREFLIGHT_S).encode("ascii")),
    ]
    if _has(scope, b"access-control-request-private-network"):
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send, rules: Rules) -> None:
    """Answer at once and end the connection; what is still on its way is thrown away for a moment.

    A connection closed over unread bytes is reset, and the client would not see the answer.
    """
    body = as_json(error_body(refusal, scope))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error_headers(refusal).items()]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    loop = asyncio.get_running_loop()
    until, left = loop.time() + LINGER_S, max(2 * rules.max_body, LINGER_BYTES)
    while left > 0 and loop.time() < until:
        try:
            message = await asyncio.wait_for(receive(), until - loop.time())
        except asyncio.TimeoutError:
            break
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
