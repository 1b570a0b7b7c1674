"""Work that takes long, on a thread of its own, so that neither a screen nor the page's other windows wait for it."""

from __future__ import annotations

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
        self.cancel, self._work = cancel, work
        self._result: list[T] = []
        self._error: DFlashError | None = None
        self._thread = threading.Thread(target=self._run, name="dflash-screen-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except DFlashError as error:
            self._error = error
        except Exception as fault:  # as in the service's worker: whoever looks must not be left waiting
            what = f"unexpected failure: {type(fault).__name__}: {fault}"
            self._error = EngineError(what, "the conversation goes on")
            self._error.__cause__ = fault

    @property
    def running(self) -> bool:
        """True until there is a result or an error."""
        return self._thread.is_alive()

    @property
    def error(self) -> DFlashError | None:
        """Tell why nothing came of it, once it does not run any more."""
        return self._error

    @property
    def result(self) -> T:
        """Return what came of it, once it does not run any more.

        Raises:
            DFlashError: nothing came of it.
        """
        if self._error is not None:
            raise self._error
        return self._result[0]

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False when it still runs."""
        self._thread.join(timeout_s)
        return not self.running

    async def pulses(self, every_s: float = PULSE_S) -> AsyncIterator[None]:
        """Yield again and again while it runs. Who stops listening before the end also calls ``cancel``."""
        import asyncio  # not at the top: a command that shows a download does without

        while self.running:
            yield
            await asyncio.sleep(every_s)
