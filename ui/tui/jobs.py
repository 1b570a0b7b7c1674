"""Work that must not hold up the screen: one thread at a time, whose words come through a mailbox.

The screen empties the mailbox at its own pace, so that a thousand events a second are some thirty
drawings. No widget is touched from the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dflash_local.errors import DFlashError, EngineError


@dataclass(frozen=True, slots=True)
class Ended:
    """Is the last word of a job: its result, or why there is none."""

    result: Any
    error: DFlashError | None


@dataclass(frozen=True, slots=True)
class Notification:
    """Is one thing that the program, and no reply of the model, has to say."""

    text: str
    level: Literal["note", "warning"] = "note"


class Inbox:
    """Keeps in order what threads have to say to the screen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        """Add a word; never waits."""
        with self._lock:
            self._items.append(item)

    def take(self) -> list[Any]:
        with self._lock:
            items, self._items = self._items, []
        return items


class Jobs:
    """Runs one job at a time on a thread of its own."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begin; ``Ended`` with what ``work`` returned or raised is the job's last word."""

        def run() -> None:
            result: Any = None
            error: DFlashError | None = None
            try:
                result = work()
            except DFlashError as known:
                error = known
            except Exception as fault:  # as in the service's worker: the screen must not be left waiting
                what = f"unexpected failure: {type(fault).__name__}: {fault}"
                error = EngineError(what, "the conversation goes on")
                error.__cause__ = fault
            self._inbox.put(Ended(result, error))

        self._thread = threading.Thread(target=run, name="dflash-screen-job", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the running job; True when none runs."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()
