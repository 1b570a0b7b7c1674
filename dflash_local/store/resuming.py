"""The body of one file, over as many connections as it takes.

huggingface_hub resumes as well, but not after a reset nor in another run, and it drops up to 10 MB each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dflash_local.errors import DownloadError
from dflash_local.store.bounds import TooSlow
from dflash_local.store.errors_of_hub import http_library, of_status, of_transport
from dflash_local.store.file_download import CONTENT_RANGE, FileDownload, TooLong
from dflash_local.store.http_client import HubClient

# Bytes that are written at once. Of 1 MiB glibc gives the memory back to the system after each block, and faulting its
# pages in again took half of the receiving thread's time.
BLOCK = 1 << 18
BLOCK_S = 0.2  # and how old they get at most: what is not written is lost with the process


def receive(client: HubClient, download: FileDownload, write: Callable[[bytes], object]) -> None:
    """Hand the file's bytes from ``download.done`` on to ``write``, in blocks. The client is in use by this thread.

    Raises:
        DownloadError: given up. NotTheFile: there is more than the download's size, or another file.
        OSError: huggingface_hub's own for a refusal, or of ``write``. Stopped: the pull was.
    """
    patience, failures, reached = client.patience, 0, download.done
    while download.done < download.size:
        try:
            _over_one_connection(client, download, write)
            trouble = None
        except (DownloadError, http_library().TransportError, TooSlow) as error:
            if download.connections < 2 and isinstance(error, DownloadError):  # not even one answer, after all tries
                raise
            trouble = error
        client.check()
        if download.done == download.size:
            return
        failures = 1 if download.done - reached >= patience.progress else failures + 1
        reached = download.done
        what = _in_words(client, download, trouble)
        if failures >= patience.tries:
            raise DownloadError(f"{what.message} (given up after {failures} tries)", what.hint) from trouble
        share = download.done / download.size
        download.notify(f"{what.message}; going on at {share:.0%} (try {failures + 1} of {patience.tries})")
        client.pause(patience.pause(failures))


def _over_one_connection(client: HubClient, download: FileDownload, write: Callable[[bytes], object]) -> None:
    """What one answer gives. All that came was written when this ends, however it does."""
    import huggingface_hub
    from huggingface_hub.utils import hf_raise_for_status

    download.connections += 1
    headers = {**download.headers, **({"Range": f"bytes={download.done}-"} if download.done else {})}
    with huggingface_hub.get_session().stream("GET", download.url, headers=headers) as answer:
        if answer.status_code not in (200, 206):
            if download.connections > 1:
                raise of_status(answer.status_code, download.name, client.endpoint)
            answer.read()
            hf_raise_for_status(answer)
        blocks = _Blocks(write)
        try:
            for piece in _from(answer, download, answer.iter_raw()):
                if download.done + len(piece) > download.size:
                    raise TooLong(f"has more than the {download.size:,} bytes it should have")
                blocks.add(piece)
                download.done += len(piece)
        finally:
            blocks.flush()


class _Blocks:
    """Gathers small pieces, which cost a call each."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._pieces: list[bytes] = []
        self._size, self._since = 0, time.monotonic()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= BLOCK or time.monotonic() - self._since > BLOCK_S:
            self.flush()

    def flush(self) -> None:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if pieces:
            self._write(b"".join(pieces))
        self._since = time.monotonic()


def _from(answer: Any, download: FileDownload, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces after byte ``download.done``: a server may ignore the range."""
    begin = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    start = int(begin[1]) if answer.status_code == 206 and begin else 0
    if start > download.done:
        raise DownloadError(f"was sent from byte {start:,} on, not from {download.done:,}")
    skip = download.done - start
    for piece in pieces:
        if skip < len(piece):
            yield piece[skip:]
        skip = max(0, skip - len(piece))


def _in_words(client: HubClient, download: FileDownload, error: BaseException | None) -> DownloadError:
    if isinstance(error, TooSlow):
        return DownloadError(f"{download.name} comes too slowly", "check the connection, or try again later")
    if error is None:
        return DownloadError(f"{download.name} ended too early", "try again later")
    known = error if isinstance(error, DownloadError) else of_transport(error, client.endpoint)
    return DownloadError(f"{download.name}: {known.message}", known.hint)
