"""A session under observation, for the one who keeps it.

Knows events and requests only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflash_local.events import Event
from dflash_local.loaded import SessionFacts
from dflash_local.request import Request
from dflash_local.service.service import Session

Observer = Callable[[Request, Event], None]


class Watched:
    """A session that reports every event before it is yielded.

    Attributes:
        active: a prompt is being prepared, or a reply made.
    """

    def __init__(self, session: Session, happened: Observer, ended: Callable[[], None]) -> None:
        self._session, self._happened, self._ended = session, happened, ended
        self.active = False

    @property
    def facts(self) -> SessionFacts:
        """What was loaded, and how."""
        return self._session.facts

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """As the session's: the prompt is prepared in the call."""
        self.active, begun = True, False
        try:
            events = self._session.generate(request, cancelled)
            begun = True
        finally:
            if not begun:
                self._end()
        return self._watch(request, events)

    def _watch(self, request: Request, events: Iterator[Event]) -> Iterator[Event]:
        try:
            for event in events:
                self._happened(request, event)
                yield event
        finally:
            self._end()

    def _end(self) -> None:
        self.active = False
        self._ended()

    def close(self) -> None:
        """Release the session."""
        self._session.close()
