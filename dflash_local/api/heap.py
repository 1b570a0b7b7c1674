"""Keeps a long-lived server's heap small, where the C library is glibc."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from typing import Any

M_ARENA_MAX = -8  # malloc.h
ARENAS = 2
SETTLE_S = 10.0  # by then what a request held is freed, and all that end together are one trim


def bound_arenas() -> None:
    """Let the threads that come share ``ARENAS`` heaps; nothing where the C library has no ``mallopt``.

    glibc gives each thread a heap of its own, eight a core. Python holds its lock while it allocates, so that they
    save it no waiting, and every one of them keeps the holes of its largest moment.
    """
    _call("mallopt", M_ARENA_MAX, ARENAS)


def trim() -> None:
    """Return free pages of the heap to the system; nothing where the C library has no ``malloc_trim``.

    Freed blocks leave holes between small ones that live on. They are never returned by themselves, so that a server
    under a mixed load grows for hours. Takes some milliseconds and lets other threads of Python run.
    """
    _call("malloc_trim", 0)


def _call(name: str, *values: int) -> None:
    if sys.platform == "linux":
        found: Any = getattr(ctypes.CDLL(None), name, None)
        if found is not None:
            found(*values)


class Trimmer:
    """Trims a while after requests ended, however many they were. Belongs to the event loop."""

    def __init__(self) -> None:
        self._due: asyncio.TimerHandle | None = None

    def ended(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(SETTLE_S, self._start)

    def _start(self) -> None:
        self._due = None
        asyncio.get_running_loop().run_in_executor(None, trim)
