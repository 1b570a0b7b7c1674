"""Work that takes long, on a thread of its own, followed from a handler of the page without holding up the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from dflash_local.errors import DFlashError, EngineError

PULSE_S = 0.1
T = TypeVar("T")


class Job(Generic[T]):
    """One piece of work; its thread ends with it.

    Args:
        work: what is done. cancel: asks it to end early; it then raises, or returns what it has.
    """

    def __init__(self, work: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> None:
        self._work, self._cancel = work, cancel
        self._result: list[T] = []
        self._error: DFlashError | None = EngineError("it ended without a result", "see the server's messages")
        self._thread = threading.Thread(target=self._run, name="dflash-page-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
            self._error = None
        except DFlashError as error:
            self._error = error

    @property
    def running(self) -> bool:
        """True until there is a result or an error."""
        return self._thread.is_alive()

    @property
    def error(self) -> DFlashError | None:
        """Says why nothing came of it, when it is not running any more."""
        return self._error

    @property
    def result(self) -> T:
        """What came of it, when it is not running any more.

        Raises:
            DFlashError: nothing came of it.
        """
        if self._error is not None:
            raise self._error
        return self._result[0]

    def cancel(self) -> None:
        """Ask it to end early."""
        self._cancel()

    async def pulses(self, every_s: float = PULSE_S) -> AsyncIterator[None]:
        """Yield again and again while it runs. Who stops listening before the end also calls ``cancel``."""
        while self.running:
            yield
            await asyncio.sleep(every_s)
