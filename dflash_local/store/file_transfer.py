"""One file on its way into the cache, over as many connections and runs as it takes.

huggingface_hub resumes as well, but not after a reset; it deletes what it has when it gives up or is stopped, and never
takes up what another run left. What we wrote stays when a pull ends early, under a name that tells it from the partial
files of other programs; a later pull takes it by renaming it, which only one of several can.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import DownloadError
from dflash_local.store.cache import PART, Cache
from dflash_local.store.hub import RemoteFile
from dflash_local.store.hub_client import CONTENT_RANGE, HubClient
from dflash_local.store.hub_errors import NotTheFile, TooLong, TooSlow, http_library, of_transport, refusal
from dflash_local.store.names import file_parts
from dflash_local.store.verify import Proof


@dataclass
class FileDownload:
    """Follows a file of one commit that is requested.

    Attributes:
        url: its lasting address at the endpoint (a redirect's target expires).
        part: the file that holds the first of its bytes, when one was left.
        notify: takes a line about trouble on the way. done: bytes received or found here. found: those of a part.
        verified: bytes proven: none before the whole file is. connections: how many were opened for it.
    """

    repo: str
    commit: str
    file: RemoteFile
    url: str
    part: Path | None = None
    notify: Callable[[str], None] = lambda _text: None
    done: int = 0
    found: int = 0
    verified: int = 0
    connections: int = 0

    @property
    def name(self) -> str:
        return f"{self.file.path} of {self.repo}"

    @property
    def size(self) -> int:
        return self.file.size


def receive(client: HubClient, download: FileDownload, write: Callable[[bytes], object]) -> None:
    """Hand the file's bytes from ``download.done`` on to ``write``.

    Raises:
        DownloadError: refused, or given up. NotTheFile: there is more than the download's size, or another file.
        OSError: of ``write``. Stopped: the pull was.
    """
    client.download = download
    patience, failures, reached = client.patience, 0, download.done
    while download.done < download.size:
        trouble: Exception | None = None
        try:
            _receive_once(client, download, write)
            what = DownloadError(f"{download.name} ended too early", "try again later")
        except TooSlow as error:
            trouble = error
            what = DownloadError(f"{download.name} comes too slowly", "check the connection, or try again later")
        except (DownloadError, http_library().TransportError) as error:
            if download.connections < 2 and isinstance(error, DownloadError):  # not even one answer, after all tries
                raise
            trouble = error
            known = error if isinstance(error, DownloadError) else of_transport(error, client.hub.endpoint)
            what = DownloadError(f"{download.name}: {known.message}", known.hint)
        client.check()
        if download.done == download.size:
            return
        failures = 1 if download.done - reached >= patience.progress else failures + 1
        reached = download.done
        if failures >= patience.tries:
            raise DownloadError(f"{what.message} (given up after {failures} tries)", what.hint) from trouble
        share = download.done / download.size
        download.notify(f"{what.message}; going on at {share:.0%} (try {failures + 1} of {patience.tries})")
        client.pause(patience.pause(failures))


def _receive_once(client: HubClient, download: FileDownload, write: Callable[[bytes], object]) -> None:
    """Take what one answer gives."""
    download.connections += 1
    headers = {"Range": f"bytes={download.done}-"} if download.done else {}
    with client.http.stream("GET", download.url, headers=headers) as answer:
        if answer.status_code not in (200, 206):
            raise refusal(answer, client.hub, download.repo, download.file.path, download.commit)
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


class PartFile:
    """Holds the part of a blob that has come: use it as a context, write to it, finish it.

    Args:
        left: what an earlier pull left of it; hashed and taken up when it is still there. ``size``: bytes so far.
        on_piece: as of ``Proof.read``, for what was left.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, blobs: Path, file: RemoteFile, left: Path | None, on_piece: Callable[[int], None]) -> None:
        blobs.mkdir(parents=True, exist_ok=True)
        self._blob, self._proof = blobs / file.etag, Proof(file)
        self.path = blobs / f"{file.etag}{PART}{secrets.token_hex(4)}.incomplete"
        begun = left is not None and _take(left, self.path, file.size)
        # Unbuffered: what is not written is lost with the process.
        self._output = self.path.open("r+b" if begun else "wb", buffering=0)
        if begun:
            self._proof.read(self._output, on_piece)

    @property
    def size(self) -> int:
        return self._proof.size

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Keep what may be right."""
        self._output.close()
        if self.size == 0 or (kind and issubclass(kind, TooLong)):
            self.path.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """Append a piece. Raises OSError."""
        rest = memoryview(piece)
        while rest:
            rest = rest[self._output.write(rest) :]
        self._proof.update(piece)

    def finish(self) -> str:
        """Name the blob and return its sha256. NotTheFile: a wrong one, deleted. OSError."""
        try:
            sha256 = self._proof.result()
        except NotTheFile:
            self.path.unlink(missing_ok=True)
            raise
        os.replace(self.path, self._blob)
        return sha256


def _take(left: Path, path: Path, size: int) -> bool:
    """Rename what an earlier pull left; returns False when it is gone or too long."""
    try:
        os.rename(left, path)
    except OSError:  # another pull was faster
        return False
    if os.lstat(path).st_size > size:
        path.unlink()
        return False
    return True


def link(cache: Cache, repo: str, commit: str, file: RemoteFile) -> None:
    """Enter a blob into a snapshot as huggingface_hub does: a relative link, else a copy. OSError, DownloadError."""
    blob = cache.repo_folder(repo) / "blobs" / file.etag
    path = cache.snapshot(repo, commit).joinpath(*file_parts(repo, file.path))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.symlink(os.path.relpath(blob, path.parent), path)
    except FileExistsError:  # of a blob that was gone, or of another pull
        pass
    except (OSError, NotImplementedError):
        if os.path.lexists(path) or not os.access(path.parent, os.W_OK):
            raise
        shutil.copyfile(blob, path)
