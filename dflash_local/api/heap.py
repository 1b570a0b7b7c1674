"""Gives memory back that the C library keeps after large requests, where it is glibc's."""

from __future__ import annotations

import asyncio
import ctypes
import sys

LARGE_BYTES = 128 * 2**10  # glibc's own first limit for what it maps, and so gives back, by itself
SETTLE_S = 1.0  # by then what a request held is freed, and several that end together are one trim


def trim() -> None:
    """Return free pages of the heap to the system; nothing where the C library has no ``malloc_trim``.

    Freed blocks of large requests leave holes between small ones that live on, in the arena of each thread. They are
    never returned by themselves, so that a server under a mixed load grows for hours.
    """
    if sys.platform == "linux" and (found := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        found(0)


class Trimmer:
    """Trims a moment after a large request ended. Belongs to the event loop."""

    def __init__(self) -> None:
        self._due: asyncio.TimerHandle | None = None

    def ended(self, size: int) -> None:
        """A request whose body had ``size`` bytes has ended."""
        if size >= LARGE_BYTES and self._due is None:
            self._due = asyncio.get_running_loop().call_later(SETTLE_S, self._start)

    def _start(self) -> None:
        self._due = None
        asyncio.get_running_loop().run_in_executor(None, trim)
