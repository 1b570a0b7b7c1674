"""The HTTP client that huggingface_hub sends with while we pull: trusted hosts, patience, stopping.

Everything goes over plain HTTPS, also what the Hub keeps in Xet storage (it serves both), unless the user asks for Xet:
its client opens sockets of its own, out of reach of the host list, the stall watch and Ctrl-C.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

from dflash_local.errors import DownloadError
from dflash_local.store.bounds import AnswerBound, Bound, BoundedBackend, FileBound
from dflash_local.store.errors_of_hub import PUBLIC_HUB, http_library, is_hopeless, of_status, of_transport
from dflash_local.store.file_download import CONTENT_RANGE, WEB_PAGE, FileDownload, NotTheFile, Patience, Stopped
from dflash_local.store.names import is_commit

MAX_REDIRECTS = 10
HUB_DOMAINS = ("huggingface.co", "hf.co")
_BUSY = {408, 425, 429, 500, 502, 503, 504}
_ETAG = re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_-]{0,127}"?')
_HERE = threading.local()  # the client and the download that this thread works for, and the bound of its reads
_INSTALLING = threading.Lock()
Hook = Callable[[Any], object]


class HubClient:
    """The HTTP client of one pull: put it in use, download files with it, stop it from any thread."""

    def __init__(self, endpoint: str, hosts: tuple[str, ...], patience: Patience, xet: bool = False) -> None:
        self.endpoint = endpoint
        self.patience = patience
        self.xet = xet
        self.stopped = threading.Event()
        self._hosts = hosts
        self._streams: dict[int, Any] = {}

    @contextmanager
    def in_use(self) -> Iterator[HubClient]:
        """huggingface_hub sends through this client in this thread, and in those that download with it."""
        _install()
        with _working(self, None):
            yield self

    @contextmanager
    def downloading(self, download: FileDownload) -> Iterator[None]:
        """Requests of this thread are for the download. Only while the client is in use somewhere."""
        with _working(self, download):
            try:
                yield
            finally:
                self._streams.pop(threading.get_ident(), None)

    def stop(self) -> None:
        """Let every request end now, also one that waits for bytes."""
        self.stopped.set()
        for stream in list(self._streams.values()):
            line = stream.get_extra_info("socket")
            if line is not None:
                with suppress(OSError):  # closed already
                    socket.socket.shutdown(line, socket.SHUT_RDWR)  # the plain one: TLS would wait for an answer

    def bound(self, stream: Any) -> Bound | None:
        """What this thread's reads from the stream are held to; from now on ``stop`` ends them."""
        if stream is not None:
            self._streams[threading.get_ident()] = stream
        self.check()
        bound: Bound | None = _HERE.bound
        return bound

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise Stopped

    def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request until it has an answer worth having. DownloadError: it has none. NotTheFile: a wrong body."""
        download: FileDownload | None = _HERE.download
        tries = 1 if download and download.connections > 1 else self.patience.first_tries
        response = self.send_patiently(send, request, tries, **options)
        if download and request.method == "GET" and response.status_code in (200, 206):
            self._refuse_wrong_length(response, download)
        return response

    def send_patiently(self, send: Callable[..., Any], request: Any, tries: int, **options: Any) -> Any:
        """One request, tried again while there is no answer or the server is busy, within one bound."""
        http, patience = http_library(), self.patience
        bound = _HERE.bound = AnswerBound(self.endpoint, patience)
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
                self.check()
                if number >= (min(tries, 2) if is_hopeless(error) else tries):
                    raise of_transport(error, f"{request.url.scheme}://{request.url.netloc.decode()}") from error
            else:
                if response.status_code not in _BUSY:
                    return response
                response.close()
                wait = _retry_after(response.headers) or wait
                if number >= tries or wait > bound.timeout(patience.longest_wait_s):
                    raise of_status(response.status_code, request.url.path, self.endpoint, wait)
            _HERE.hops = 0
            self.pause(wait)

    def _refuse_wrong_length(self, response: Any, download: FileDownload) -> None:
        """Raises NotTheFile before a byte of it is read."""
        if "text/html" in response.headers.get("Content-Type", "").lower() and not download.name.endswith(".html"):
            response.close()
            raise NotTheFile(WEB_PAGE)
        whole = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        announced = whole[2] if whole else response.headers.get("Content-Length", "")
        if announced.isdigit() and int(announced) != download.size:
            response.close()
            raise NotTheFile(f"has {int(announced):,} bytes instead of {download.size:,}")

    def leaving(self, request: Any) -> None:
        """Before every hop: may it go there, and may the token go with it?"""
        self.check()
        self._check_address(str(request.url))
        if _origin(str(request.url)) not in (_origin(self.endpoint), _origin(PUBLIC_HUB)):
            request.headers.pop("Authorization", None)

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
        if any(host == known or host.endswith(f".{known}") for known in (own, *self._hosts, *HUB_DOMAINS)):
            return ""
        return "" if _is_loopback(host) and _is_loopback(own) else "that host is not one of the endpoint's"

    def arrived(self, response: Any) -> None:
        """After every hop: count it, and let nothing pass that huggingface_hub would build a path of."""
        self.check()
        if not response.has_redirect_location:
            _HERE.hops = 0
        else:
            _HERE.hops += 1
            if _HERE.hops > MAX_REDIRECTS:
                raise DownloadError(f"{self.endpoint} redirects more than {MAX_REDIRECTS} times", "check HF_ENDPOINT")
            self._check_address(urljoin(str(response.request.url), response.headers["Location"]))
        headers, download = response.headers, _HERE.download
        if download and response.request.method == "GET" and response.status_code in (200, 206):
            _HERE.bound = FileBound(self.patience)
        elif headers.get("Content-Encoding", "identity").lower() != "identity":  # it would be unpacked without a bound
            raise DownloadError(f"{self.endpoint} compressed an answer, against the request", "check HF_ENDPOINT")
        for name in ("X-HF-Warning", *(() if self.xet else ("X-Xet-Hash",))):  # huggingface_hub would print the first
            headers.pop(name, None)
        if download and response.request.method == "HEAD" and response.status_code < 400:
            self._check_commit(headers, download)
        page = response.status_code == 200 and "text/html" in headers.get("Content-Type", "").lower()
        if page and download is None:
            raise DownloadError(f"the answer of {self.endpoint} {WEB_PAGE}", "open a browser, then try again")

    def _check_commit(self, headers: Any, download: FileDownload) -> None:
        """What huggingface_hub takes for a file's name in the cache and for its size."""
        commit, size = headers.get("X-Repo-Commit"), headers.get("X-Linked-Size", "")
        if commit is None and "text/html" in headers.get("Content-Type", "").lower():
            raise NotTheFile(WEB_PAGE)
        for name in ("ETag", "X-Linked-Etag"):
            if not _ETAG.fullmatch(headers.get(name, "x")):
                raise DownloadError(f"{self.endpoint} sent a malformed {name} for {download.name}", "check HF_ENDPOINT")
        if commit not in (None, download.commit):
            sent = f"commit {commit}" if is_commit(commit) else "a malformed commit"
            wrong = f"{self.endpoint} sent {download.name} of {sent}, not of {download.commit}"
            raise DownloadError(wrong, "check HF_ENDPOINT")
        if size.isdigit() and int(size) != download.size:
            raise NotTheFile(f"has {int(size):,} bytes instead of {download.size:,}")


def _install() -> None:
    """Have huggingface_hub send through our kind of client from now on.

    Its factory has a setter and no getter, so none can be given back: ours stays, and in threads that work for no
    ``HubClient`` its clients do what the hooks of the client before them did.
    """
    import huggingface_hub

    with _INSTALLING:
        hooks = huggingface_hub.get_session().event_hooks
        if _sends_for_us not in hooks["response"]:
            huggingface_hub.set_client_factory(partial(_client, tuple(hooks["request"]), tuple(hooks["response"])))


@contextmanager
def _working(client: HubClient, download: FileDownload | None) -> Iterator[None]:
    _HERE.client, _HERE.download, _HERE.hops, _HERE.bound = client, download, 0, None
    try:
        yield
    finally:
        _HERE.client = _HERE.download = None


def _sends_for_us(response: Any) -> None:
    """The hook that marks a client of ours."""
    client = getattr(_HERE, "client", None)
    if client is not None:
        client.arrived(response)


def _client(requests: Sequence[Hook], responses: Sequence[Hook]) -> Any:
    """Sends through the ``HubClient`` of the thread it is used in; without one it just has these hooks."""

    def leaving(request: Any) -> None:
        client = getattr(_HERE, "client", None)
        for hook in requests if client is None else (client.leaving,):
            hook(request)

    def arrived(response: Any) -> None:
        if getattr(_HERE, "client", None) is None:
            for hook in responses:
                hook(response)

    class Client(http_library().Client):  # type: ignore[misc]
        def send(self, request: Any, **options: Any) -> Any:
            client = getattr(_HERE, "client", None)
            return super().send(request, **options) if client is None else client.send(super().send, request, **options)

    hooks = {"request": [leaving], "response": [_sends_for_us, arrived]}
    client = Client(event_hooks=hooks, follow_redirects=True, timeout=None)
    for transport in (client._transport, *client._mounts.values()):  # the second: through proxies
        if transport is not None:
            transport._pool._network_backend = BoundedBackend(transport._pool._network_backend, _bound_of)
    return client


def _bound_of(stream: Any) -> Bound | None:
    client = getattr(_HERE, "client", None)
    return None if client is None else client.bound(stream)


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
