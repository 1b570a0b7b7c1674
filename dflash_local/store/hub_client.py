"""The HTTP client that speaks to the Hub: trusted hosts, patience, bounds, stopping.

Everything goes over plain HTTPS, also what the Hub keeps in Xet storage (it serves both), unless the user asks for Xet.
Bounds are counted where bytes leave the socket, so that headers, redirects and bodies cost alike.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from dflash_local.errors import DownloadError
from dflash_local.store.hub_errors import (
    PUBLIC_HUB,
    WEB_PAGE,
    NotTheFile,
    Stopped,
    TooSlow,
    http_library,
    is_hopeless,
    of_status,
    of_transport,
)
from dflash_local.terminal import byte_size

if TYPE_CHECKING:
    from dflash_local.store.file_transfer import FileDownload
    from dflash_local.store.hub import Hub

MAX_ANSWER_BYTES = 4 << 20  # the longest published listings have 300 kB; JSON takes up to 25 times its size in memory
MAX_REDIRECTS = 10
HUB_DOMAINS = ("huggingface.co", "hf.co")
CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_BUSY = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class HubPatience:
    """Says how much of a bad line is borne.

    Attributes:
        connect_s, answer_s, stall_s: seconds without a connection, without an answer, without a byte of a file.
        whole_s: seconds for a whole answer that is no file, such as a listing, with all tries.
        floor: bytes per second, over ``stall_s`` of waiting, below which a stream counts as stalled.
        first_tries: tries for a request that gets no usable answer.
        tries: failures of a file in a row with less than ``progress`` bytes between them.
        pause_s: wait before the second try, doubled up to ``longest_pause_s`` for each further one.
        longest_wait_s: a server that asks for a longer wait (Retry-After) is given up at once.
    """

    connect_s: float = 5.0
    answer_s: float = 10.0
    stall_s: float = 30.0
    whole_s: float = 60.0
    floor: int = 1024
    first_tries: int = 4
    tries: int = 6
    progress: int = 1 << 20
    pause_s: float = 0.5
    longest_pause_s: float = 8.0
    longest_wait_s: float = 60.0

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row."""
        return min(self.pause_s * 2.0 ** (failures - 1), self.longest_pause_s)


class AnswerBound:
    """Bounds all that one question may cost, with its redirects, tries and informational responses.

    Both methods raise DownloadError: the answer is longer than ``MAX_ANSWER_BYTES`` or takes longer than ``whole_s``.
    """

    def __init__(self, endpoint: str, patience: HubPatience) -> None:
        self._endpoint, self._seconds = endpoint, patience.whole_s
        self._end, self._left = time.monotonic() + patience.whole_s, MAX_ANSWER_BYTES

    def timeout(self, requested: float | None) -> float | None:
        left = self._end - time.monotonic()
        if left <= 0:
            late = f"{self._endpoint} did not finish its answer within {self._seconds:g} s"
            raise DownloadError(late, "try again later, or check HF_ENDPOINT")
        return left if requested is None else min(requested, left)

    def count(self, size: int, seconds: float) -> None:
        self._left -= size
        if self._left < 0:
            long = f"the answer of {self._endpoint} is longer than {byte_size(MAX_ANSWER_BYTES)}"
            raise DownloadError(long, "no listing is that long: check HF_ENDPOINT")


class FileBound:
    """Holds a file's body to a least speed; its size is the receiver's to check. ``count`` raises TooSlow."""

    def __init__(self, patience: HubPatience) -> None:
        self._patience, self._waited, self._got = patience, 0.0, 0

    def timeout(self, requested: float | None) -> float | None:
        return requested

    def count(self, size: int, seconds: float) -> None:
        self._waited += seconds
        self._got += size
        if self._waited >= self._patience.stall_s:
            if self._got < self._patience.floor * self._waited:
                raise TooSlow("comes too slowly")
            self._waited, self._got = 0.0, 0


BoundOf = Callable[[Any], AnswerBound | FileBound]  # what the next read from a stream is held to


class BoundedStream:
    """Wraps a network stream of httpcore's and holds its reads to a bound."""

    def __init__(self, stream: Any, bound_of: BoundOf) -> None:
        self._stream, self._bound_of = stream, bound_of

    def read(self, max_bytes: int, timeout: float | None = None) -> Any:
        bound = self._bound_of(self)
        begin = time.monotonic()
        data = self._stream.read(max_bytes, bound.timeout(timeout))
        bound.count(len(data), time.monotonic() - begin)
        return data

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> Any:
        limit = self._bound_of(self).timeout(timeout)
        return BoundedStream(self._stream.start_tls(ssl_context, server_hostname, limit), self._bound_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BoundedBackend:
    """Wraps a network backend of httpcore's and opens bounded streams."""

    def __init__(self, backend: Any, bound_of: BoundOf) -> None:
        self._backend, self._bound_of = backend, bound_of

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **options: Any) -> BoundedStream:
        limit = self._bound_of(None).timeout(timeout)
        return BoundedStream(self._backend.connect_tcp(host, port, timeout=limit, **options), self._bound_of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class HubClient:
    """Sends the requests of one thread; any other may stop it.

    Attributes:
        http: the client of the HTTP library, held to all that this class is about.
        download: the file that requests are for; None for a listing.
        child: fetches in the place of this client. stopped: ends every request once it is set; the threads of a pull
            share it.
    """

    def __init__(self, hub: Hub, stopped: threading.Event | None = None) -> None:
        self.hub, self.patience = hub, hub.patience
        self.stopped = stopped or threading.Event()
        self.download: FileDownload | None = None
        self.child: subprocess.Popen[str] | None = None
        self._hops = 0
        self._bound: AnswerBound | FileBound = AnswerBound(hub.endpoint, hub.patience)
        self._stream: Any = None
        self.http = _http_client(self)

    def interrupt(self) -> None:
        """End a request that waits for bytes, or the child; ``stopped`` is set before."""
        if (child := self.child) is not None:
            child.kill()
        line = self._stream.get_extra_info("socket") if self._stream is not None else None
        if line is not None:
            with suppress(OSError):  # closed already
                socket.socket.shutdown(line, socket.SHUT_RDWR)  # the plain one: TLS would wait for an answer

    def bound(self, stream: Any) -> AnswerBound | FileBound:
        """Return what the next read from the stream is held to; from now on ``interrupt`` ends it."""
        self._stream = stream or self._stream
        self.check()
        return self._bound

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise Stopped

    def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request until it has an answer worth having, within one bound.

        Raises:
            DownloadError: it has none. NotTheFile: a wrong body.
        """
        http, patience, download = http_library(), self.patience, self.download
        tries = 1 if download and download.connections > 1 else patience.first_tries
        bound = self._bound = AnswerBound(self.hub.endpoint, patience)
        silence = patience.stall_s if options.get("stream") else patience.answer_s
        limits = {"connect": patience.connect_s, "read": silence, "write": silence, "pool": None}
        request.extensions = {**request.extensions, "timeout": limits}
        request.headers["Accept-Encoding"] = "identity"  # a range of a compressed answer is none of the file
        number = 0
        while True:
            number += 1
            wait = patience.pause(number)
            try:
                response = send(request, **options)
            except http.TransportError as error:
                self._hops = 0
                self.check()
                if number >= (min(tries, 2) if is_hopeless(error) else tries):
                    raise of_transport(error, f"{request.url.scheme}://{request.url.netloc.decode()}") from error
            else:
                if response.status_code not in _BUSY:
                    break
                response.close()
                wait = _retry_after(response.headers) or wait
                if number >= tries or wait > (bound.timeout(patience.longest_wait_s) or 0.0):
                    raise of_status(response.status_code, request.url.path, self.hub.endpoint, wait)
            self.pause(wait)
        if download and request.method == "GET" and response.status_code in (200, 206):
            _refuse_wrong_length(response, download)
        return response

    def leaving(self, request: Any) -> None:
        """Check before every hop whether it may go there, and whether the token may go with it."""
        self.check()
        self._check_address(str(request.url))
        if _origin(str(request.url)) not in (_origin(self.hub.endpoint), _origin(PUBLIC_HUB)):
            request.headers.pop("Authorization", None)

    def arrived(self, response: Any) -> None:
        """Count every answered hop; let nothing pass that would be unpacked, printed or taken for a listing."""
        self.check()
        headers, endpoint = response.headers, self.hub.endpoint
        self._hops = self._hops + 1 if response.has_redirect_location else 0  # huggingface_hub follows some by itself
        if self._hops:
            if self._hops > MAX_REDIRECTS:
                raise DownloadError(f"{endpoint} redirects more than {MAX_REDIRECTS} times", "check HF_ENDPOINT")
            self._check_address(urljoin(str(response.request.url), headers["Location"]))
        if self.download is not None and response.request.method == "GET" and response.status_code in (200, 206):
            self._bound = FileBound(self.patience)
        elif headers.get("Content-Encoding", "identity").lower() != "identity":  # it would be unpacked without a bound
            raise DownloadError(f"{endpoint} compressed an answer, against the request", "check HF_ENDPOINT")
        headers.pop("X-HF-Warning", None)  # huggingface_hub would print it
        if self.download is None and response.status_code == 200 and is_page(headers):
            raise DownloadError(f"the answer of {endpoint} {WEB_PAGE}", "open a browser, then try again")

    def _check_address(self, address: str) -> None:
        url, ours = urlsplit(address), urlsplit(self.hub.endpoint)
        host, own = url.hostname or "", ours.hostname or ""
        if url.scheme not in ("https", "http"):
            why = "only https is followed"
        elif url.scheme == "http" and ours.scheme != "http":
            why = "the connection would not be encrypted"
        elif any(host == known or host.endswith(f".{known}") for known in (own, *HUB_DOMAINS)):
            return
        elif _is_loopback(host) and _is_loopback(own):
            return
        else:
            why = "that host is not one of the endpoint's"
        refused = f"{self.hub.endpoint} leads to {url.scheme}://{host[:100]}, which is refused: {why}"
        raise DownloadError(refused, "check HF_ENDPOINT; use a mirror that sends the files itself")


def _http_client(client: HubClient) -> Any:
    """Make a client of the HTTP library that is held to ``client``."""
    from huggingface_hub.utils import build_hf_headers

    class Client(http_library().Client):  # type: ignore[misc]
        def send(self, request: Any, **options: Any) -> Any:
            return client.send(super().send, request, **options)

    # False, not None: huggingface_hub would look for a token of its own.
    headers = build_hf_headers(token=client.hub.token or False, library_name="dflash-local")
    hooks = {"request": [client.leaving], "response": [client.arrived]}
    made = Client(headers=headers, event_hooks=hooks, follow_redirects=True, timeout=None, verify=_tls())
    for transport in (made._transport, *made._mounts.values()):  # the second: through proxies
        if transport is not None:
            transport._pool._network_backend = BoundedBackend(transport._pool._network_backend, client.bound)
    return made


@cache
def _tls() -> Any:
    """Read the trusted certificates once, which takes 30 ms."""
    return http_library().create_ssl_context()


def _refuse_wrong_length(response: Any, download: FileDownload) -> None:
    """Raise NotTheFile before a byte of it is read."""
    whole = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    announced = whole[2] if whole else response.headers.get("Content-Length", "")
    fault = ""
    if is_page(response.headers) and not download.name.endswith(".html"):
        fault = WEB_PAGE
    elif announced.isdigit() and int(announced) != download.size:
        fault = f"has {int(announced):,} bytes instead of {download.size:,}"
    if fault:
        response.close()
        raise NotTheFile(fault)


def is_page(headers: Any) -> bool:
    return "text/html" in headers.get("Content-Type", "").lower()


def _retry_after(headers: Any) -> float | None:
    text = headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
