"""Looks at the memory of the device again and again, on a thread of its own: a driver may take seconds to answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dflash_local.planner.occupancy import Occupancy

PERIOD_S = 2.0


class MemoryWatch:
    """Tells what ``read`` found when that has changed, at most once in two seconds but for ``look``.

    Args:
        read, notify: called on the watch's thread.
    """

    def __init__(self, read: Callable[[], Occupancy], notify: Callable[[Occupancy], None]) -> None:
        self._read, self._notify = read, notify
        self._wake = threading.Event()
        self._ended = False

    def start(self) -> None:
        threading.Thread(target=self._watch, name="dflash-memory", daemon=True).start()

    def look(self) -> None:
        """Look now: another pair was loaded."""
        self._wake.set()

    def stop(self) -> None:
        self._ended = True
        self._wake.set()

    def _watch(self) -> None:
        last = Occupancy()
        while not self._ended:
            found = self._read()
            if found != last:
                last = found
                self._notify(found)
            self._wake.wait(PERIOD_S)
            self._wake.clear()
