"""One reply on its way to a window: what came of it so far, and the way to end it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dflash_local.errors import EngineError
from dflash_local.events import Event, Finished, Notice, Piece, Step
from dflash_local.loaded import SessionFacts
from dflash_local.service.gathered import Answer
from dflash_local.service.pieces import SafePieces
from dflash_local.service.service import Service
from dflash_local.terminal import safe, safe_line
from dflash_local.ui.job import Job
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.text import SafeMarkdown

MAX_POINTS = 120  # of the curve of one reply


def waiting_for(service: Service) -> str:
    """Say how far the pair's load is that a request waits for."""
    load = service.status.progress
    return f"loading {service.model.name}: {safe_line(load.stage)} {load.fraction:.0%}" if load else "waiting"


class ReplyJob(Job[None]):
    """A reply on its thread, and how the page shows it. It may be looked at from any thread.

    Args:
        source: the reply itself. message: what is asked, where it was not asked before.
        known: what the readings are of; another pair makes them begin anew.
        then: called at its end, from its thread.

    Attributes:
        notices: what is to be known of this reply. facts: of the pair that replies; before it does, of the one before.
        pieces: the answer with the origins of its tokens, without control characters.
        curve: seconds and tokens per second, over the whole reply. version: grows with everything that came.
    """

    def __init__(
        self,
        source: Answer,
        message: str,
        service: Service,
        readings: Readings,
        known: SessionFacts | None,
        then: Callable[[ReplyJob], None],
    ) -> None:
        self.source, self.message, self.readings, self.facts = source, message, readings, known
        self.notices: list[str] = []
        self.pieces: list[Piece] = []
        self.curve: list[tuple[float, float]] = []
        self.version = 0
        self._service, self._then = service, then
        self._lock = threading.Lock()
        self._safe = SafePieces()
        self._answer, self._thoughts = SafeMarkdown(), SafeMarkdown()
        self._began: float | None = None
        self._every = 1  # steps for one point of the curve
        self._steps = 0
        if (begun := source.begun) is not None:
            self._show((Piece(safe(begun.thinking), "thinking"), Piece(safe(begun.content))))
        super().__init__(self._listen, source.cancel)

    def _listen(self) -> None:
        try:
            with self.source as source:
                with self._lock:
                    facts = self._service.facts
                    if facts is not None and facts is not self.facts:
                        self.facts = facts
                        self.readings.load(facts)
                        self.readings.begin(source.request.mode)
                for event in source:
                    self._take(event)
            if source.finished is None:
                raise EngineError("the reply ended without saying why")
        finally:
            self._then(self)

    @property
    def answer(self) -> str:
        """Is the answer as Markdown for the page."""
        with self._lock:
            return self._answer.text

    @property
    def thoughts(self) -> str:
        """Is what was thought as Markdown for the page."""
        with self._lock:
            return self._thoughts.text

    @property
    def thinking_title(self) -> str:
        return self._safe.thinking_title

    @property
    def is_thinking(self) -> bool:
        """True while no word of the answer has come."""
        return self.source.finished is None and not self.pieces

    @property
    def state(self) -> str:
        """Says what is going on."""
        if not self.source.submitted:
            return waiting_for(self._service)
        return "stopping" if self.source.cancelled and self.source.finished is None else self.readings.state

    def _take(self, event: Event) -> None:
        with self._lock:
            self.readings.take(event)
            if isinstance(event, Step):
                self._count(event)
                self._show(self._safe.feed(event))
            elif isinstance(event, Finished):
                self._show(self._safe.finish())
            elif isinstance(event, Notice):
                self.notices.append(event.message)
            self.version += 1

    def _count(self, step: Step) -> None:
        self._began = step.t_s if self._began is None else self._began
        self._steps += 1
        if self.readings.now is not None and self._steps % self._every == 0:
            self.curve.append((step.t_s - self._began, self.readings.now))
        if len(self.curve) > MAX_POINTS:
            self._every *= 2
            del self.curve[::2]

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.channel == "thinking":
                self._thoughts.feed(piece.text)
            elif piece.text:
                self.pieces.append(piece)
                self._answer.feed(piece.text)
