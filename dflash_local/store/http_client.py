"""The HTTP client that speaks to the Hub: trusted hosts, patience, bounds, stopping.

Everything goes over plain HTTPS, also what the Hub keeps in Xet storage (it serves both), unless the user asks for Xet.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urljoin, urlsplit

from dflash_local.errors import DownloadError
from dflash_local.store.bounds import AnswerBound, Bound, BoundedBackend, FileBound
from dflash_local.store.errors_of_hub import PUBLIC_HUB, http_library, is_hopeless, of_status, of_transport
from dflash_local.store.file_download import CONTENT_RANGE, WEB_PAGE, FileDownload, NotTheFile, Patience, Stopped

MAX_REDIRECTS = 10
HUB_DOMAINS = ("huggingface.co", "hf.co")
_BUSY = {408, 425, 429, 500, 502, 503, 504}


class HubClient:
    """Sends the requests of one thread; any other may stop it.

    Attributes:
        http: the client of the HTTP library, held to all that this class is about.
        download: the file that requests are for; None for a listing.
        child: fetches in the place of this client. stopped: ends every request once it is set; the threads of a pull
            share it.
    """

    def __init__(
        self,
        endpoint: str,
        patience: Patience,
        token: str | None = None,
        stopped: threading.Event | None = None,
    ) -> None:
        self.endpoint, self.patience = endpoint, patience
        self.stopped = stopped or threading.Event()
        self.download: FileDownload | None = None
        self.child: subprocess.Popen[str] | None = None
        self._hops = 0
        self._bound: Bound = AnswerBound(endpoint, patience)
        self._stream: Any = None
        self.http = _http_client(self, token)

    def interrupt(self) -> None:
        """End a request that waits for bytes, or the child; ``stopped`` is set before."""
        if (child := self.child) is not None:
            child.kill()
        line = self._stream.get_extra_info("socket") if self._stream is not None else None
        if line is not None:
            with suppress(OSError):  # closed already
                socket.socket.shutdown(line, socket.SHUT_RDWR)  # the plain one: TLS would wait for an answer

    def bound(self, stream: Any) -> Bound:
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
        bound = self._bound = AnswerBound(self.endpoint, patience)
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
                if number >= tries or wait > bound.timeout(patience.longest_wait_s):
                    raise of_status(response.status_code, request.url.path, self.endpoint, wait)
            self.pause(wait)
        if download and request.method == "GET" and response.status_code in (200, 206):
            _refuse_wrong_length(response, download)
        return response

    def leaving(self, request: Any) -> None:
        """Check before every hop whether it may go there, and whether the token may go with it."""
        self.check()
        self._check_address(str(request.url))
        if _origin(str(request.url)) not in (_origin(self.endpoint), _origin(PUBLIC_HUB)):
            request.headers.pop("Authorization", None)

    def arrived(self, response: Any) -> None:
        """Count every answered hop; let nothing pass that would be unpacked, printed or taken for a listing."""
        self.check()
        headers, file = response.headers, self.download is not None and response.request.method == "GET"
        self._hops = self._hops + 1 if response.has_redirect_location else 0  # huggingface_hub follows some by itself
        if self._hops:
            if self._hops > MAX_REDIRECTS:
                raise DownloadError(f"{self.endpoint} redirects more than {MAX_REDIRECTS} times", "check HF_ENDPOINT")
            self._check_address(urljoin(str(response.request.url), headers["Location"]))
        if file and response.status_code in (200, 206):
            self._bound = FileBound(self.patience)
        elif headers.get("Content-Encoding", "identity").lower() != "identity":  # it would be unpacked without a bound
            raise DownloadError(f"{self.endpoint} compressed an answer, against the request", "check HF_ENDPOINT")
        headers.pop("X-HF-Warning", None)  # huggingface_hub would print it
        if self.download is None and response.status_code == 200 and _is_page(headers):
            raise DownloadError(f"the answer of {self.endpoint} {WEB_PAGE}", "open a browser, then try again")

    def _check_address(self, address: str) -> None:
        url = urlsplit(address)
        why = self._distrust(url.scheme, url.hostname or "")
        if why:
            refused = f"{self.endpoint} leads to {url.scheme}://{(url.hostname or '')[:100]}, which is refused: {why}"
            raise DownloadError(refused, "check HF_ENDPOINT; use a mirror that sends the files itself")

    def _distrust(self, scheme: str, host: str) -> str:
        ours = urlsplit(self.endpoint)
        if scheme not in ("https", "http"):
            return "only https is followed"
        if scheme == "http" and ours.scheme != "http":
            return "the connection would not be encrypted"
        own = ours.hostname or ""
        if any(host == known or host.endswith(f".{known}") for known in (own, *HUB_DOMAINS)):
            return ""
        return "" if _is_loopback(host) and _is_loopback(own) else "that host is not one of the endpoint's"


def _http_client(client: HubClient, token: str | None) -> Any:
    """Make a client of the HTTP library that is held to ``client``."""
    from huggingface_hub.utils import build_hf_headers

    class Client(http_library().Client):  # type: ignore[misc]
        def send(self, request: Any, **options: Any) -> Any:
            return client.send(super().send, request, **options)

    # False, not None: huggingface_hub would look for a token of its own.
    headers = build_hf_headers(token=token or False, library_name="dflash-local")
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
    if _is_page(response.headers) and not download.name.endswith(".html"):
        fault = WEB_PAGE
    elif announced.isdigit() and int(announced) != download.size:
        fault = f"has {int(announced):,} bytes instead of {download.size:,}"
    if fault:
        response.close()
        raise NotTheFile(fault)


def _is_page(headers: Any) -> bool:
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
