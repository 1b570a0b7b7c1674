"""Describe how many threads a CPU computes the next cycle with: all, or one where other programs keep the cores busy.

After each of a cycle's two hundred products all threads wait for the last, so one that shares its core holds up the
others: beside two busy programs on two cores a forward of SmolLM2-135M took two to five times as long with two threads
as with one. On idle cores two are faster. Either may begin at any time, so both are tried again and again.
"""

from __future__ import annotations

import ctypes
import sys

import torch

SMALL_MODEL = 50_000_000  # parameters; below, one CPU thread is fastest
# Each call that waits for the device or launches a graph gives Python's lock away, a few times a cycle. Beside a thread
# that computes in Python, getting it back takes this long: 5 ms if nothing is said, as much as a whole cycle.
SWITCH_S = 0.0005
THREADS = torch.get_num_threads()  # what torch took before any toy was loaded
GAIN = 0.9  # of the time, what another number must be faster than
FRESH = 0.25  # weight of the last cycle in what a cycle usually takes
TRIED = 3  # cycles of a trial; the first, which may start threads, does not count
HOPELESS = 1.5  # times as long in the first: no more of them are tried
FIRST_WAIT, LONGEST_WAIT = 8, 64  # cycles between trials, doubled when nothing came of one


class CpuThreads:
    """The number that cycles are computed with, from what they were seen to take. ``count``: of the next cycle."""

    def __init__(self, most: int = THREADS) -> None:
        self._counts = (most, 1)
        self.count = most
        self._usual: dict[int, float] = {}  # seconds of a cycle outside trials, by its rows
        self._wait = self._patience = FIRST_WAIT
        self._trial: list[tuple[int, float]] | None = None  # rows and seconds

    def settle(self) -> None:
        """Let torch compute the next cycle with that number; called by the thread that computes."""
        if torch.get_num_threads() != self.count:
            torch.set_num_threads(self.count)

    def add(self, rows: int, seconds: float) -> None:
        """Learn from a cycle that has ended."""
        if self._trial is None:
            usual = self._usual.get(rows, seconds)
            self._usual[rows] = usual + FRESH * (seconds - usual)
            self._wait -= 1
            if self._wait <= 0 and self._counts[0] > 1:
                self._trial, self.count = [], self._other
            return
        self._trial.append((rows, seconds))
        if len(self._trial) == TRIED or self._compared(self._trial) > HOPELESS:
            self._judge(self._trial[1:])

    @property
    def _other(self) -> int:
        return self._counts[0] if self.count == self._counts[1] else self._counts[1]

    def _compared(self, cycles: list[tuple[int, float]]) -> float:
        """Return what they took, relative to what cycles of so many rows usually take; 1 where none was seen."""
        known = [(seconds, self._usual[rows]) for rows, seconds in cycles if rows in self._usual]
        return sum(each for each, _ in known) / sum(usual for _, usual in known) if known else 1.0

    def _judge(self, cycles: list[tuple[int, float]]) -> None:
        if self._compared(cycles) < GAIN:
            self._usual, self._patience = {}, FIRST_WAIT
        else:
            self.count, self._patience = self._other, min(2 * self._patience, LONGEST_WAIT)
        self._wait, self._trial = self._patience, None


def end_team() -> None:
    """End the threads that compute for this one; they start again where it computes again.

    GNU's OpenMP counts them for all threads of the program, and where they outnumber the cores it lets them sleep
    between products: a step takes twice as long. So a thread that has loaded a pair must not keep its own.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(torch._C.__file__)
    if hasattr(library, "omp_pause_resource_all") and not hasattr(library, "kmp_get_blocktime"):  # Intel's counts none
        library.omp_pause_resource_all(1)  # softly: settings are kept


def settle_torch(parameters: int, device: torch.device) -> None:
    """Set switches of torch that suit one sequence that grows by a few tokens at a time."""
    if device.type == "cpu":
        # Handing a 10 MB model to a second core costs more than it computes.
        torch.set_num_threads(1 if parameters < SMALL_MODEL else THREADS)
    elif device.type == "cuda":
        # cuDNN's attention builds a plan for each new length: 100 ms a call, measured on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
