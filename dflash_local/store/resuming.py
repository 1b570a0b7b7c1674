"""The body of one file as a stream that outlives its connections.

huggingface_hub resumes as well, but not after a reset, and it drops up to 10 MB each time. Knows no files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dflash_local.errors import DownloadError
from dflash_local.store.errors_of_hub import http_library, of_transport
from dflash_local.store.file_download import CONTENT_RANGE, FileDownload, NotTheFile, Patience


class Line(Protocol):
    """What a stream needs of the client it comes over."""

    endpoint: str
    patience: Patience

    def check(self) -> None:
        """Raises Stopped once the pull was stopped."""

    def pause(self, seconds: float) -> None:
        """Wait, or raise Stopped."""


class TooSlow(Exception):
    """Bytes come, but so few that the line counts as stalled."""


def resuming(line: Line, download: FileDownload, stream: Any, continued: Callable[[int], Any]) -> Any:
    """A byte stream of the HTTP library in use.

    Args:
        stream: the body of the first answer.
        continued: requests the file from a byte on and returns the answer, which may start earlier.

    Iterating raises:
        DownloadError: given up. NotTheFile: there is more than the download's size.
    """

    class Body(http_library().SyncByteStream):  # type: ignore[misc]
        def __init__(self) -> None:
            self.current = _Current(line, download, stream, continued)

        def __iter__(self) -> Iterator[bytes]:
            return self.current.pieces()

        def close(self) -> None:
            self.current.close()

    return Body()


class _Current:
    """The connection that the body comes over now."""

    def __init__(self, line: Line, download: FileDownload, stream: Any, continued: Callable[[int], Any]) -> None:
        self.line, self.download, self.stream, self.continued = line, download, stream, continued
        self.rest = watched(line, stream)

    def close(self) -> None:
        self.stream.close()

    def pieces(self) -> Iterator[bytes]:
        """The whole file, over as many connections as it takes and patience allows."""
        download, failures, reached, at = self.download, 0, 0, 0
        troubles = (http_library().TransportError, TooSlow)
        while True:
            trouble: BaseException | None = None
            try:
                for piece in self.rest:
                    at += len(piece)
                    if at > download.size:
                        raise NotTheFile(f"has more than the {download.size:,} bytes it should have")
                    download.done = at
                    yield piece
            except troubles as error:
                trouble = error
            if at == download.size:
                return
            self.line.check()
            failures = 1 if at - reached >= self.line.patience.progress else failures + 1
            reached = at
            failures = self._reopen(at, failures, self._in_words(trouble))

    def _reopen(self, at: int, failures: int, trouble: DownloadError) -> int:
        """Go on at byte ``at`` over a new connection; returns the failures in a row by then."""
        patience, download = self.line.patience, self.download
        while True:
            self.close()
            if failures >= patience.tries:
                raise DownloadError(f"{trouble.message} (given up after {failures} tries)", trouble.hint) from trouble
            share = at / max(download.size, 1)
            download.notify(f"{trouble.message}; going on at {share:.0%} (try {failures + 1} of {patience.tries})")
            self.line.pause(patience.pause(failures))
            try:
                self._continue(at)
                return failures
            except (DownloadError, http_library().TransportError, TooSlow) as error:
                self.line.check()
                failures += 1
                trouble = self._in_words(error)

    def _continue(self, at: int) -> None:
        """Take a new answer, and of it what comes after byte ``at``: a server may ignore the range."""
        answer = self.continued(at)
        self.stream = answer.stream
        begin = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        start = int(begin[1]) if answer.status_code == 206 and begin else 0
        if start > at:
            raise DownloadError(f"{self.download.name} was sent from byte {start:,} on, not from {at:,}")
        self.rest = _without(watched(self.line, self.stream), at - start)

    def _in_words(self, error: BaseException | None) -> DownloadError:
        name = self.download.name
        if isinstance(error, DownloadError):
            return DownloadError(f"{name}: {error.message}", error.hint)
        if isinstance(error, TooSlow):
            return DownloadError(f"{name} comes too slowly", "check the connection, or try again later")
        if error is None:
            return DownloadError(f"{name} ended too early", "try again later")
        known = of_transport(error, self.line.endpoint)
        return DownloadError(f"{name}: {known.message}", known.hint)


def watched(line: Line, stream: Any) -> Iterator[bytes]:
    """The pieces of a stream, with only the time spent waiting for them held against it.

    Raises:
        TooSlow: less than ``patience.floor`` bytes per second over ``patience.stall_s``.
    """
    pieces, waited, got = iter(stream), 0.0, 0
    while True:
        before = time.monotonic()
        piece = next(pieces, None)
        if piece is None:
            return
        line.check()
        waited += time.monotonic() - before
        got += len(piece)
        if waited >= line.patience.stall_s:
            if got < line.patience.floor * waited:
                raise TooSlow
            waited, got = 0.0, 0
        yield piece


def _without(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    """A stream less its first ``count`` bytes."""
    for piece in pieces:
        if count < len(piece):
            yield piece[count:]
        count = max(0, count - len(piece))
