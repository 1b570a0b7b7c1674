"""Bounds on what a server sends, counted where bytes leave the socket: headers, redirects and bodies alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dflash_local.errors import DownloadError
from dflash_local.store.file_download import Patience
from dflash_local.terminal import byte_size

MAX_ANSWER_BYTES = 4 << 20  # the longest published listings have 300 kB; JSON takes up to 25 times its size in memory


class TooSlow(TimeoutError):
    """Says that bytes of a file come, but so few that the line counts as stalled."""


class AnswerBound:
    """Bounds all that one question may cost, with its redirects, tries and informational responses.

    Both methods raise DownloadError: the answer is longer than ``MAX_ANSWER_BYTES`` or takes longer than ``whole_s``.
    """

    def __init__(self, endpoint: str, patience: Patience) -> None:
        self._endpoint, self._seconds = endpoint, patience.whole_s
        self._end, self._left = time.monotonic() + patience.whole_s, MAX_ANSWER_BYTES

    def timeout(self, requested: float | None) -> float:
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
    """Holds a file's body to a least speed; its size is the receiver's to check.

    ``count`` raises TooSlow: less than ``patience.floor`` bytes per second over ``stall_s`` of waiting.
    """

    def __init__(self, patience: Patience) -> None:
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


Bound = AnswerBound | FileBound
BoundOf = Callable[[Any], Bound]  # what the next read is held to, given the stream that is about to be used


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
