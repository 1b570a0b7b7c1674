"""The HTTP client that huggingface_hub is lent while we pull: trusted hosts, patience, resuming, stopping.

Knows requests and bytes, and of a file only its address and size; refuses to know the cache and screens.

Everything goes over plain HTTPS, also what the Hub keeps in Xet storage (it serves both): the Xet client
opens sockets of its own, out of reach of the host list, the stall watch and Ctrl-C. On a fast line that
costs some speed, which is the price of one path that is tested.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from dflash_local.errors import DownloadError
from dflash_local.store.errors_of_hub import PUBLIC_HUB, http_library, is_hopeless, of_status, of_transport
from dflash_local.store.file_download import CONTENT_RANGE, WEB_PAGE, FileDownload, NotTheFile, Patience, Stopped
from dflash_local.store.names import is_commit
from dflash_local.store.resuming import resuming

MAX_REDIRECTS = 10
HUB_DOMAINS = ("huggingface.co", "hf.co")
_BUSY = {408, 425, 429, 500, 502, 503, 504}
_ETAG = re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_-]{0,127}"?')
_HERE = threading.local()  # the client and the download that this thread works for


class HubClient:
    """The HTTP client of one pull: put it in use, download files with it, stop it from any thread."""

    def __init__(self, endpoint: str, hosts: tuple[str, ...], patience: Patience) -> None:
        self.endpoint = endpoint
        self.patience = patience
        self.stopped = threading.Event()
        self._hosts = hosts
        self._streams: dict[int, Any] = {}

    @contextmanager
    def in_use(self) -> Iterator[HubClient]:
        """huggingface_hub sends through this client in this thread, and in those that download with it."""
        with _LOAN.made(), _working(self, None):
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
                try:
                    socket.socket.shutdown(line, socket.SHUT_RDWR)  # the plain one: TLS would wait for an answer
                except OSError:  # closed already
                    pass

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise Stopped

    def send(self, send: Callable[..., Any], build: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request until it has an answer worth having; a file's body resumes by itself.

        Raises:
            DownloadError: no such answer after all tries, or one that must not be followed.
        """
        download: FileDownload | None = _HERE.download
        response = self.send_patiently(send, request, self.patience.first_tries, **options)
        if download and request.method == "GET" and response.status_code in (200, 206):
            self._refuse_wrong_length(response, download)
            response.stream = resuming(
                self, download, response.stream, lambda again: self._continued(send, build, download, again)
            )
        return response

    def send_patiently(self, send: Callable[..., Any], request: Any, tries: int, **options: Any) -> Any:
        """One request, tried again while there is no answer or the server is busy."""
        http, patience = http_library(), self.patience
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
                if number >= tries or wait > patience.longest_wait_s:
                    raise of_status(response.status_code, request.url.path, self.endpoint, wait)
            _HERE.hops = 0
            self.pause(wait)

    def _continued(
        self, send: Callable[..., Any], build: Callable[..., Any], download: FileDownload, start: int
    ) -> Any:
        """The rest of a file from ``start``, asked for at its lasting address; any body but that is refused."""
        request = build("GET", download.url, headers={**download.headers, "Range": f"bytes={start}-"})
        response = self.send_patiently(send, request, 1, stream=True, follow_redirects=True)
        if response.status_code not in (200, 206):
            response.close()
            raise of_status(response.status_code, download.name, self.endpoint)
        self._refuse_wrong_length(response, download)
        return response

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
            raise DownloadError(
                f"{self.endpoint} leads to {url.scheme}://{url.hostname or ''}, which is refused: {why}",
                "check HF_ENDPOINT; use a mirror that sends the files itself",
            )

    def _distrust(self, scheme: str, host: str) -> str:
        ours = urlsplit(self.endpoint)
        if scheme not in ("https", "http"):
            return "only https is followed"
        if scheme == "http" and ours.scheme != "http":
            return "the connection would not be encrypted"
        own = (ours.hostname or "", *self._hosts)
        if any(host == known or host.endswith(f".{known}") for known in (*own, *HUB_DOMAINS)):
            return ""
        return (
            "" if _is_loopback(host) and _is_loopback(ours.hostname or "") else "that host is not one of the endpoint's"
        )

    def arrived(self, response: Any) -> None:
        """After every hop: count it, and let nothing pass that huggingface_hub would build a path of."""
        stream = response.extensions.get("network_stream")
        if stream is not None:
            self._streams[threading.get_ident()] = stream
        self.check()
        if not response.has_redirect_location:
            _HERE.hops = 0
        else:
            _HERE.hops += 1
            if _HERE.hops > MAX_REDIRECTS:
                raise DownloadError(f"{self.endpoint} redirects more than {MAX_REDIRECTS} times", "check HF_ENDPOINT")
            self._check_address(urljoin(str(response.request.url), response.headers["Location"]))
        headers, download = response.headers, _HERE.download
        for name in ("X-Xet-Hash", "X-HF-Warning"):  # see above; huggingface_hub would print the other
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
            raise DownloadError(
                f"{self.endpoint} sent {download.name} of {sent}, not of {download.commit}", "check HF_ENDPOINT"
            )
        if size.isdigit() and int(size) != download.size:
            raise NotTheFile(f"has {int(size):,} bytes instead of {download.size:,}")


class _Loan:
    """Lends huggingface_hub a factory of clients while a ``HubClient`` is in use: it keeps one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: Any = None

    @contextmanager
    def made(self) -> Iterator[None]:
        import huggingface_hub
        from huggingface_hub.utils import _http

        with self._lock:
            if not self._users:
                self._before = _http._GLOBAL_CLIENT_FACTORY  # there is a setter and no getter
                huggingface_hub.set_client_factory(_client)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    huggingface_hub.set_client_factory(self._before)


_LOAN = _Loan()


@contextmanager
def _working(client: HubClient, download: FileDownload | None) -> Iterator[None]:
    _HERE.client, _HERE.download, _HERE.hops = client, download, 0
    try:
        yield
    finally:
        _HERE.client = _HERE.download = None


def _client() -> Any:
    """Sends through the ``HubClient`` of the thread it is used in; without one it is huggingface_hub's own."""
    from huggingface_hub.utils import _http

    def leaving(request: Any) -> None:
        client = getattr(_HERE, "client", None)
        if client is None:
            _http.hf_request_event_hook(request)
        else:
            client.leaving(request)

    def arrived(response: Any) -> None:
        client = getattr(_HERE, "client", None)
        if client is not None:
            client.arrived(response)

    class Client(http_library().Client):  # type: ignore[misc]
        def send(self, request: Any, **options: Any) -> Any:
            client = getattr(_HERE, "client", None)
            if client is None:
                return super().send(request, **options)
            return client.send(super().send, self.build_request, request, **options)

    return Client(event_hooks={"request": [leaving], "response": [arrived]}, follow_redirects=True, timeout=None)


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
