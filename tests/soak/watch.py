"""What a server process takes while it works: resident memory, descriptors and threads, and whether they grow.

Counts the process and its children together. Figures are medians over a stretch of the run, so that one large request
that happens to be in memory decides nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from statistics import median

import psutil

MAX_GROWTH = 10**6  # bytes of resident memory, over the last half of a run
MAX_MORE = 2  # descriptors, threads or processes: what a sample may catch in passing
STRETCH = 0.1  # share of the run whose samples make one figure


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process and its children. ``at``: seconds since the start. ``resident``: bytes."""

    at: float
    resident: int
    descriptors: int
    threads: int
    processes: int


def look(process: psutil.Process, at: float) -> Sample:
    """The sum over the process and its children.

    Raises:
        psutil.NoSuchProcess: the process itself is gone.
    """
    resident = descriptors = threads = processes = 0
    for one in (process, *process.children(recursive=True)):
        try:
            with one.oneshot():
                figures = one.memory_info().rss, one.num_fds(), one.num_threads()
        except psutil.NoSuchProcess:
            if one is process:
                raise
            continue  # a child that ended just now
        resident, descriptors, threads = resident + figures[0], descriptors + figures[1], threads + figures[2]
        processes += 1
    return Sample(at, resident, descriptors, threads, processes)


class Watch:
    """Samples a process from a thread of its own until it is stopped or the process ends."""

    def __init__(self, pid: int, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._process, self._every_s = psutil.Process(pid), every_s
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def look(self) -> Sample:
        """One sample now."""
        return look(self._process, time.monotonic() - self._began)

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                self.samples.append(self.look())
            except psutil.NoSuchProcess:
                return
            self._stopped.wait(self._every_s)


def points(samples: Sequence[Sample]) -> tuple[Sample, Sample, Sample]:
    """Return the run's begin, middle and end: each the median of a tenth of it.

    Raises:
        ValueError: a stretch without a sample; the run was too short.
    """
    last = samples[-1].at if samples else 0.0
    width = STRETCH * last
    begin, middle, end = (0.0, width), ((last - width) / 2, (last + width) / 2), (last - width, last)
    return _median(samples, *begin), _median(samples, *middle), _median(samples, *end)


def _median(samples: Sequence[Sample], low: float, high: float) -> Sample:
    inside = [sample for sample in samples if low <= sample.at <= high]
    if not inside:
        raise ValueError(f"no sample between {low:.0f} and {high:.0f} s")
    at, *counts = (median(values) for values in zip(*map(astuple, inside)))
    return Sample(at, *map(int, counts))


def complaints(samples: Sequence[Sample], before: Sample, after: Sample) -> Iterator[str]:
    """Every bar that was missed.

    Args:
        before, after: the idle server, before the load and after it.
    """
    _, middle, end = points(samples)
    growth = end.resident - middle.resident
    if growth >= MAX_GROWTH:
        yield f"resident memory grew by {growth / 1e6:.2f} MB in the last half, {MAX_GROWTH / 1e6:g} MB is the bar"
    for name in ("descriptors", "threads", "processes"):
        more = getattr(end, name) - getattr(middle, name)
        if more > MAX_MORE:
            yield f"{name} grew by {more:g} in the last half"
    for name in ("descriptors", "processes"):  # threads wait for the next burst
        more = getattr(after, name) - getattr(before, name)
        if more > MAX_MORE:
            yield f"{name} of the idle server: {getattr(before, name)} before the load, {getattr(after, name)} after it"
