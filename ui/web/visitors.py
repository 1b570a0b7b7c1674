"""Who is at the page: what each window has and does, told apart by Gradio's session."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from dflash_local.service.service import Service
from dflash_local.ui.job import Job
from dflash_local.ui.web.chat_view import ChatView

if TYPE_CHECKING:
    from dflash_local.ui.web.bench_run import BenchRun
    from dflash_local.ui.web.load_dialog import Asked, Planned

MOST = 200  # windows that are remembered
KEEP_S = 3600.0  # a window that lost its connection may come back so long


@dataclass(slots=True)
class Visitor:
    """One window.

    Attributes:
        model: the one that its settings were filled in for. origins: show where each token came from.
        chosen: the pair that was picked in the table of pairs. order: of that table's rows.
        asked, planned, planned_before: ways to load: wanted, shown, and shown before. bench: the last run.
        jobs: what it has under way besides its conversation, by the tab. left: when it went, by the monotonic clock.
    """

    chat: ChatView
    model: str = ""
    origins: bool = False
    chosen: str = ""
    order: list[str] = field(default_factory=list)
    asked: Asked | None = None
    planned: Planned | None = None
    planned_before: Planned | None = None
    bench: BenchRun | None = None
    jobs: dict[str, Job[Any]] = field(default_factory=dict)
    left: float | None = None

    @contextmanager
    def runs(self, tab: str, job: Job[Any]) -> Iterator[None]:
        """Have the job under way within; a window that is closed leaves it, which ends the job."""
        self.jobs[tab] = job
        try:
            yield
        finally:
            job.cancel()
            self.jobs.pop(tab, None)

    def cancel(self, tab: str) -> None:
        """End what a tab has under way."""
        if job := self.jobs.get(tab):
            job.cancel()

    def stop(self) -> None:
        """End everything that it has under way."""
        self.chat.stop()
        for tab in list(self.jobs):
            self.cancel(tab)


class Visitors:
    """Knows all windows. Its methods may be called from any thread."""

    def __init__(self, service: Service, most: int = MOST) -> None:
        self._service, self._most = service, most
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Visitor] = OrderedDict()

    def of(self, request: gr.Request) -> Visitor:
        """Find the window that a request came from."""
        name = request.session_hash or ""
        with self._lock:
            visitor = self._all.pop(name, None) or Visitor(ChatView(self._service))
            visitor.left = None
            self._all[name] = visitor
            gone = self._forget()
        for other in gone:
            other.stop()
        return visitor

    def leave(self, request: gr.Request) -> None:
        """End what a window has under way that was closed, or lost its connection."""
        with self._lock:
            visitor = self._all.get(request.session_hash or "")
        if visitor is not None:
            visitor.left = time.monotonic()
            visitor.stop()

    def _forget(self) -> list[Visitor]:
        """Drop those that went long ago, and the oldest of too many."""
        now = time.monotonic()
        old = [name for name, one in self._all.items() if one.left is not None and now - one.left > KEEP_S]
        old += [name for name in self._all if name not in old][: max(0, len(self._all) - len(old) - self._most)]
        return [self._all.pop(name) for name in old]
