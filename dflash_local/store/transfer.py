"""A few daemon threads that make files present and proven, while the caller's thread listens and may stop them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_local.errors import DFlashError, DownloadError, Interrupted
from dflash_local.events import Notice, PullProgress
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.errors_of_hub import hub_errors, of_hub_error
from dflash_local.store.file_download import FileDownload, NotTheFile, Stopped
from dflash_local.store.http_client import HubClient
from dflash_local.store.hub import Hub, RemoteFile
from dflash_local.store.manifest import ManifestFile
from dflash_local.store.part_file import PartFile, link
from dflash_local.store.resuming import receive
from dflash_local.store.verify import discard, prove

THREADS = 4
TICK_S = 0.1  # between two looks at the progress, and at most so long until a stop is noticed
STOP_S = 1.0  # how long the threads get to clear up after themselves
PullEvent = PullProgress | Notice


@dataclass(frozen=True, slots=True)
class DownloadTask:
    """One file of one commit that is to be in the cache and proven. ``part``: what an earlier pull left of it."""

    repo: str
    commit: str
    file: RemoteFile
    part: Path | None = None


class _Outcome(NamedTuple):
    """A task, and the record of its file or the error that it ended in; neither after a fault of this program."""

    task: DownloadTask
    result: ManifestFile | DFlashError | None


class Transfer:
    """The files of one pull. ``client`` is in use while this works; ``cancelled`` is polled every ``TICK_S``."""

    def __init__(
        self,
        hub: Hub,
        cache: Cache,
        client: HubClient,
        on_event: Callable[[PullEvent], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self.records: dict[str, dict[str, ManifestFile]] = {}  # by repo and path
        self._hub, self._cache, self._client = hub, cache, client
        self._on_event, self._cancelled = on_event, cancelled
        self._totals: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._downloads: dict[str, list[FileDownload]] = {}
        self._reported: dict[str, tuple[int, int]] = {}
        self._messages: queue.SimpleQueue[_Outcome | Notice] = queue.SimpleQueue()

    def expect(self, repo: str, total: int, proven: Sequence[ManifestFile] = ()) -> None:
        """A repo to come: its bytes in all, and those of its files that need no work."""
        self._totals[repo] = total
        self._before[repo] = sum(record.size for record in proven)
        self.records[repo] = {record.path: record for record in proven}

    def run(self, tasks: Sequence[DownloadTask]) -> None:
        """Return when every file is there and proven; ``records`` then holds them.

        Raises:
            Interrupted: cancelled, or Ctrl-C; the threads have ended or are about to.
            DFlashError: the first failure; the rest was stopped.
        """
        jobs: queue.SimpleQueue[tuple[DownloadTask, FileDownload]] = queue.SimpleQueue()
        for task in tasks:
            download = self._download(task)
            self._downloads.setdefault(task.repo, []).append(download)
            jobs.put((task, download))
        names = [f"pull-{number}" for number in range(min(THREADS, len(tasks)))]
        threads = [threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        done = False
        try:
            self._listen(len(tasks))
            done = True
        except KeyboardInterrupt as stop:
            raise Interrupted("stopped by Ctrl-C") from stop
        finally:
            if not done:
                self._client.stop()
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
                continue
            count -= 1
            task, result = message
            if isinstance(result, DFlashError):
                raise result
            if result is None:
                raise DownloadError(f"the download of {task.file.path} ended in a fault of this program")
            self.records[task.repo][result.path] = result

    def _report_progress(self, final: bool = False) -> None:
        for repo, total in self._totals.items():
            before, downloads = self._before[repo], self._downloads.get(repo, ())
            done = min(total, before + sum(download.done for download in downloads))
            verified = before + sum(download.verified for download in downloads)
            if (done, verified) != self._reported.get(repo) or (final and repo not in self._reported):
                self._reported[repo] = done, verified
                found = before + sum(download.found for download in downloads)
                self._on_event(PullProgress(repo, done, total, verified, found))

    def _download(self, task: DownloadTask) -> FileDownload:
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers

        url = huggingface_hub.hf_hub_url(task.repo, task.file.path, revision=task.commit, endpoint=self._hub.endpoint)
        # False, not None: it would look for a token of its own.
        headers = build_hf_headers(token=self._hub.token or False, library_name="dflash-local")
        name = f"{task.file.path} of {task.repo}"
        return FileDownload(name, url, headers, task.commit, task.file.size, self._warn, part=task.part)

    def _warn(self, text: str) -> None:
        self._messages.put(Notice(text, "warning"))

    # In the threads

    def _work(self, jobs: queue.SimpleQueue[tuple[DownloadTask, FileDownload]]) -> None:
        expected: tuple[type[Exception], ...] = (DFlashError, *hub_errors())
        with suppress(Stopped):
            while not self._client.stopped.is_set():
                try:
                    task, download = jobs.get_nowait()
                except queue.Empty:
                    return
                result: ManifestFile | DFlashError | None = None
                try:
                    with self._client.downloading(download):
                        result = self._obtained(task, download)
                except expected as error:
                    self._client.check()
                    hub, file = self._hub, task.file.path
                    result = of_hub_error(
                        error, task.repo, hub.endpoint, bool(hub.token), file=file, revision=task.commit
                    )
                finally:
                    self._messages.put(_Outcome(task, result))

    def _obtained(self, task: DownloadTask, download: FileDownload) -> ManifestFile:
        """The record of the file, fetched if it is not there, and once more if it is not what it should be."""
        reason: NotTheFile | None = None
        for _ in range(2):
            if reason is not None:
                self._warn(f"{download.name} {reason}: fetched again")
            download.done = download.found = 0
            try:
                return self._proven(task, download)
            except NotTheFile as fault:
                discard(self._cache, task.repo, task.commit, task.file.path)
                reason = fault
        raise DownloadError(f"{download.name} {reason}, twice in a row", "try again later, or check HF_ENDPOINT")

    def _proven(self, task: DownloadTask, download: FileDownload) -> ManifestFile:
        file = task.file
        here = self._cache.entry(task.repo, task.commit, file.path) is not None
        if not here and self._hub.xet and file.sha256:
            self._fetch_over_xet(task, download)
            here = True
        if here:
            record = self._proven_here(task, download)
        else:
            with self._locked(task):
                record = self._fetched(task, download)
        download.done = download.verified = file.size
        return record

    def _proven_here(self, task: DownloadTask, download: FileDownload) -> ManifestFile:
        def on_piece(read: int) -> None:
            self._client.check()
            if not fetched:
                download.done = download.found = read

        fetched = download.done > 0
        return prove(self._cache, self._entry(task), task.file, on_piece)

    def _entry(self, task: DownloadTask) -> Entry:
        entry = self._cache.entry(task.repo, task.commit, task.file.path)
        if entry is None:
            raise DownloadError(f"{task.file.path} of {task.repo} vanished after its download", "pull again")
        return entry

    def _fetched(self, task: DownloadTask, download: FileDownload) -> ManifestFile:
        """Put the file into the cache and prove it; the blob may be there, of another commit or program."""
        cache, file = self._cache, task.file
        blobs = cache.repo_folder(task.repo) / "blobs"
        if os.path.lexists(blobs / file.etag):
            link(cache, task.repo, task.commit, file)
            return self._proven_here(task, download)
        with PartFile(blobs, file, download.part) as part:
            download.part = part.path
            download.done = download.found = part.size
            receive(self._client, download, part.write)
            sha256 = part.finish()
        link(cache, task.repo, task.commit, file)
        entry = self._entry(task)
        return ManifestFile(file.path, file.size, sha256, entry.blob.name, entry.mtime_ns)

    @contextmanager
    def _locked(self, task: DownloadTask) -> Iterator[None]:
        """Hold the lock of the blob that all programs take which use huggingface_hub."""
        from huggingface_hub.utils import WeakFileLock

        path = self._cache.hub_locks(task.repo) / f"{task.file.etag}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            while True:
                self._client.check()
                with suppress(TimeoutError):
                    held.enter_context(WeakFileLock(path, timeout=TICK_S))
                    break
            yield

    def _fetch_over_xet(self, task: DownloadTask, download: FileDownload) -> None:
        import huggingface_hub

        download.connections += 1
        huggingface_hub.hf_hub_download(
            task.repo,
            task.file.path,
            revision=task.commit,
            cache_dir=self._cache.folder,
            endpoint=self._hub.endpoint,
            token=self._hub.token or False,
            library_name="dflash-local",
            tqdm_class=_counting(self._client, download),
            force_download=download.connections > 1,  # else it may take the wrong bytes out of its shared store
        )


def _counting(client: HubClient, download: FileDownload) -> Any:
    """A progress bar of huggingface_hub's that shows nothing, counts, and ends a download that outlived its pull."""

    class Bar:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            client.check()
            download.done = min(download.size, download.done + int(n or 0))

        def close(self) -> None:
            pass

    return Bar
