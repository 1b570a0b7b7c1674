"""A few daemon threads that make files present and proven, while the caller's thread listens and may stop them.

huggingface_hub could fetch them all, as it does over Xet; but it continues no file of an earlier run.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dflash_local.errors import DFlashError, DownloadError, Interrupted
from dflash_local.events import Notice, PullProgress
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.file_transfer import FileDownload, PartFile, link, receive
from dflash_local.store.hub import Hub
from dflash_local.store.hub_client import HubClient
from dflash_local.store.hub_errors import NotTheFile, Stopped, explained, hub_errors
from dflash_local.store.manifest import ManifestFile
from dflash_local.store.verify import discard, prove
from dflash_local.store.xet import fetch_over_xet

THREADS = 4
TICK_S = 0.1  # between two looks at the progress, and at most so long until a stop is noticed
STOP_S = 1.0  # how long the threads get to clear up after themselves
PullEvent = PullProgress | Notice


class Transfer:
    """Fetches and proves the files of one pull; ``cancelled`` is polled every ``TICK_S``."""

    def __init__(
        self, hub: Hub, cache: Cache, on_event: Callable[[PullEvent], None], cancelled: Callable[[], bool]
    ) -> None:
        self.records: dict[str, list[ManifestFile]] = {}  # by repo
        self._hub, self._cache = hub, cache
        self._stopped = threading.Event()
        self._on_event, self._cancelled = on_event, cancelled
        self._totals: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._downloads: dict[str, list[FileDownload]] = {}
        self._reported: dict[str, tuple[int, int]] = {}
        self._messages: queue.SimpleQueue[DFlashError | Notice | None] = queue.SimpleQueue()

    def expect(self, repo: str, total: int, proven: Sequence[ManifestFile] = ()) -> None:
        """Announce a repo: its bytes in all, and the records of its files that need no work."""
        self._totals[repo] = total
        self._before[repo] = sum(record.size for record in proven)
        self.records[repo] = list(proven)
        self._downloads[repo] = []

    def run(self, downloads: Sequence[FileDownload]) -> None:
        """Make every file present and proven; ``records`` then holds them.

        Raises:
            Interrupted: cancelled, or Ctrl-C; the threads have ended or are about to.
            DFlashError: the first failure; the rest was stopped.
        """
        jobs: queue.SimpleQueue[FileDownload] = queue.SimpleQueue()
        for download in downloads:
            download.notify = self._warn
            self._downloads[download.repo].append(download)
            jobs.put(download)
        clients = [self._hub.client(self._stopped) for _ in range(min(THREADS, len(downloads)))]
        threads = [
            threading.Thread(target=self._work, args=(jobs, client), name=f"pull-{number}", daemon=True)
            for number, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        done = False
        try:
            self._listen(len(downloads))
            done = True
        except KeyboardInterrupt as stop:
            raise Interrupted("stopped by Ctrl-C") from stop
        finally:
            if not done:
                self._stopped.set()
                for client in clients:
                    client.interrupt()
            end = time.monotonic() + STOP_S
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        self._report_progress(final=True)

    def _listen(self, count: int) -> None:
        """Pass on what the threads say until ``count`` files are done."""
        due = 0.0
        while count:
            if time.monotonic() >= due:
                self._report_progress()
                due = time.monotonic() + TICK_S
            if self._cancelled():
                raise Interrupted("stopped")
            try:
                message = self._messages.get(timeout=TICK_S)
            except queue.Empty:
                continue
            if isinstance(message, Notice):
                self._on_event(message)
            elif isinstance(message, DFlashError):
                raise message
            else:
                count -= 1

    def _report_progress(self, final: bool = False) -> None:
        for repo, total in self._totals.items():
            before, downloads = self._before[repo], self._downloads[repo]
            done = min(total, before + sum(download.done for download in downloads))
            verified = before + sum(download.verified for download in downloads)
            if (done, verified) != self._reported.get(repo) or (final and repo not in self._reported):
                self._reported[repo] = done, verified
                found = before + sum(download.found for download in downloads)
                self._on_event(PullProgress(repo, done, total, verified, found))

    def _warn(self, text: str) -> None:
        self._messages.put(Notice(text, "warning"))

    # In the threads

    def _work(self, jobs: queue.SimpleQueue[FileDownload], client: HubClient) -> None:
        expected = hub_errors()
        with suppress(Stopped, queue.Empty), client.http:
            while not self._stopped.is_set():
                download = jobs.get_nowait()
                repo, file = download.repo, download.file.path
                outcome: DFlashError | None = DownloadError(f"the download of {file} ended in a fault of this program")
                try:
                    self.records[repo].append(self._obtained(download, client))
                    outcome = None
                except expected as error:
                    client.check()
                    outcome = explained(error, self._hub, repo, file, download.commit)
                finally:
                    self._messages.put(outcome)

    def _obtained(self, download: FileDownload, client: HubClient) -> ManifestFile:
        """Return the record of the file, fetched if it is not there, and once more if it is not what it should be."""
        reason: NotTheFile | None = None
        for _ in range(2):
            if reason is not None:
                self._warn(f"{download.name} {reason}: fetched again")
            download.done = download.found = 0
            try:
                record = self._fetched(download, client) or self._proven(download, client)
            except NotTheFile as fault:
                discard(self._cache, download.repo, download.commit, download.file.path)
                reason = fault
                continue
            download.done = download.verified = download.size
            return record
        raise DownloadError(f"{download.name} {reason}, twice in a row", "try again later, or check HF_ENDPOINT")

    def _fetched(self, download: FileDownload, client: HubClient) -> ManifestFile | None:
        """Put the file into the cache; None where its bytes are not proven yet, of another commit, program or run."""
        file = download.file
        if self._cache.entry(download.repo, download.commit, file.path) is not None:
            return None
        if self._hub.xet and file.sha256:
            # The child takes the lock itself: what it waits for another program would count as silence.
            fetch_over_xet(self._hub, download, client)
            return None
        with self._locked(download, client):
            blobs, sha256 = self._cache.repo_folder(download.repo) / "blobs", ""
            if not os.path.lexists(blobs / file.etag):
                with PartFile(blobs, file, download.part, lambda _size: client.check()) as part:
                    download.part = part.path
                    download.done = download.found = part.size
                    receive(client, download, part.write)
                    sha256 = part.finish()
            link(self._cache, download.repo, download.commit, file)
        entry = self._entry(download)
        return ManifestFile(file.path, file.size, sha256, entry.blob.name, entry.mtime_ns) if sha256 else None

    def _proven(self, download: FileDownload, client: HubClient) -> ManifestFile:
        """Prove a file of the cache."""
        fetched = download.done > 0

        def on_piece(read: int) -> None:
            client.check()
            if not fetched:
                download.done = download.found = read

        return prove(self._cache, self._entry(download), download.file, on_piece)

    def _entry(self, download: FileDownload) -> Entry:
        entry = self._cache.entry(download.repo, download.commit, download.file.path)
        if entry is None:
            raise DownloadError(f"{download.name} vanished after its download", "pull again")
        return entry

    @contextmanager
    def _locked(self, download: FileDownload, client: HubClient) -> Iterator[None]:
        """Hold the lock of the blob that all programs take which use huggingface_hub."""
        from filelock import FileLock, Timeout

        path = self._cache.hub_locks(download.repo) / f"{download.file.etag}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        while not lock.is_locked:
            client.check()
            with suppress(Timeout):
                lock.acquire(timeout=TICK_S)
        try:
            yield
        finally:
            lock.release()
