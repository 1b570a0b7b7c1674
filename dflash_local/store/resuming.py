"""The body of one file, over as many connections as it takes.

huggingface_hub resumes as well, but not after a reset; it deletes what it has when it gives up or is stopped, and never
takes up what another run left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dflash_local.errors import DownloadError
from dflash_local.store.bounds import TooSlow
from dflash_local.store.errors_of_hub import http_library, of_status, of_transport
from dflash_local.store.file_download import CONTENT_RANGE, FileDownload, TooLong
from dflash_local.store.http_client import HubClient


def receive(client: HubClient, download: FileDownload, write: Callable[[bytes], object]) -> None:
    """Hand the file's bytes from ``download.done`` on to ``write``.

    Raises:
        DownloadError: given up. NotTheFile: there is more than the download's size, or another file.
        OSError: huggingface_hub's own for a refusal, or of ``write``. Stopped: the pull was.
    """
    client.download = download
    patience, failures, reached = client.patience, 0, download.done
    while download.done < download.size:
        try:
            _receive_once(client, download, write)
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


def _receive_once(client: HubClient, download: FileDownload, write: Callable[[bytes], object]) -> None:
    """Take what one answer gives."""
    from huggingface_hub.utils import hf_raise_for_status

    download.connections += 1
    headers = {"Range": f"bytes={download.done}-"} if download.done else {}
    with client.http.stream("GET", download.url, headers=headers) as answer:
        if answer.status_code not in (200, 206):
            if download.connections > 1:
                raise of_status(answer.status_code, download.name, client.endpoint)
            answer.read()
            hf_raise_for_status(answer)
        for piece in _wanted_pieces(answer, download):
            if download.done + len(piece) > download.size:
                raise TooLong(f"has more than the {download.size:,} bytes it should have")
            write(piece)
            download.done += len(piece)


def _wanted_pieces(answer: Any, download: FileDownload) -> Iterator[bytes]:
    """Yield the pieces after byte ``download.done``: a server may ignore the range."""
    begin = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    start = int(begin[1]) if answer.status_code == 206 and begin else 0
    if start > download.done:
        raise DownloadError(f"was sent from byte {start:,} on, not from {download.done:,}")
    skip = download.done - start
    for piece in answer.iter_raw():
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
