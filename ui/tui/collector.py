"""Keeps Python's full garbage collections out of the frames: they take a quarter second beside torch's objects.

Young objects are collected as ever. The full collection waits for a moment when nobody waits for a frame.
"""

from __future__ import annotations

import gc

NEVER = 1_000_000
WHOLE_EVERY = 32  # times
SETTLE_S = 0.1  # after the end of a job: its last frame comes first


class Collector:
    """Holds full collections back from ``hold`` to ``let_go``; ``settle`` does one when it is welcome."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None
        self._settled = 0

    def hold(self) -> None:
        """From now on only ``settle`` collects everything."""
        if self._before is None:
            self._before = gc.get_threshold()
            gc.set_threshold(self._before[0], self._before[1], NEVER)

    def settle(self) -> None:
        """Collect everything once, and look no more at what is left: libraries, the model, the screen so far.

        Now and then it looks at all of it again: messages that left the screen were looked at no more.
        """
        self._settled += 1
        if self._settled % WHOLE_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()

    def let_go(self) -> None:
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None
