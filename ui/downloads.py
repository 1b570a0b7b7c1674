"""How far a download is and how fast it goes, out of a pull's events. Draws nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from dflash_local.events import Notice, PullProgress
from dflash_local.terminal import byte_size, duration
from dflash_local.ui.job import Job

OnPull = Callable[[PullProgress | Notice], None]
WINDOW_S = 8.0  # over which the speed is taken: long enough to be calm, short enough to follow


class DownloadProgress:
    """The repositories of a pull, in the order in which they were heard of.

    Args:
        totals: bytes in all of those that are known before.

    Attributes:
        repos: the last event of each.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, totals: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.repos = {repo: PullProgress(repo, 0, total) for repo, total in totals.items()}
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque([(clock(), 0)] if totals else ())

    def take(self, event: PullProgress) -> None:
        """Count one event in."""
        if event.repo not in self.repos:
            self._points.clear()
        self.repos[event.repo] = event
        self._points.append((self._clock(), self.done - self.resumed))
        while len(self._points) > 2 and self._points[-1][0] - self._points[0][0] > WINDOW_S:
            self._points.popleft()

    @property
    def done(self) -> int:
        return sum(event.done for event in self.repos.values())

    @property
    def total(self) -> int:
        return sum(event.total for event in self.repos.values())

    @property
    def resumed(self) -> int:
        """Counts bytes that came over no line in this pull."""
        return sum(event.resumed for event in self.repos.values())

    @property
    def verified(self) -> int:
        """Counts bytes of whole files that were proven."""
        return sum(event.verified for event in self.repos.values())

    @property
    def bytes_per_s(self) -> float | None:
        """Takes the last seconds; None before there is anything to measure."""
        if len(self._points) < 2:
            return None
        (start, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / (end - start) if end > start and after > before else None

    @property
    def left_s(self) -> float | None:
        """Gives seconds until all is here at this speed; None while that is not known."""
        rate = self.bytes_per_s
        return None if rate is None else (self.total - self.done) / rate

    @property
    def line(self) -> str:
        """Says all of it: bytes, how many of them are proven and were here before, speed, time left."""
        parts = [f"{byte_size(self.done)} of {byte_size(self.total)}"]
        parts += [f"{byte_size(self.verified)} verified"] if self.verified else []
        parts += [f"{byte_size(self.resumed)} resumed"] if self.resumed else []
        if self.bytes_per_s is not None and self.left_s:
            parts += [f"{byte_size(self.bytes_per_s)}/s", f"{duration(self.left_s)} left"]
        return " · ".join(parts)


class PullJob(Job[None]):
    """A download on its thread; it may be looked at from any thread.

    Args:
        name: of the pair. pull: downloads, and tells how far it is. then: done once all of it is here.

    Attributes:
        notice: the last thing that was said besides figures.
    """

    def __init__(
        self, name: str, pull: Callable[[OnPull, Callable[[], bool]], None], then: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self.notice: Notice | None = None
        self._download, self._lock = DownloadProgress(), threading.Lock()
        stopped = threading.Event()

        def work() -> None:
            pull(self._on_event, stopped.is_set)
            then()

        super().__init__(work, stopped.set)

    def _on_event(self, event: PullProgress | Notice) -> None:
        with self._lock:
            if isinstance(event, PullProgress):
                self._download.take(event)
            else:
                self.notice = event

    @property
    def repos(self) -> list[PullProgress]:
        """List how far each repository is, in the order in which they were heard of."""
        with self._lock:
            return list(self._download.repos.values())

    @property
    def figures(self) -> tuple[int, int, str]:
        """Give bytes done, bytes in all (0 before they are known), and all of it in words."""
        with self._lock:
            download = self._download
            return download.done, download.total, download.line if download.repos else "asking the Hub what there is"
