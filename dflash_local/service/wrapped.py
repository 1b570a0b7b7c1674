"""Sessions around a session: one without drafts, one beside another, and one under observation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

from dflash_local.events import Event
from dflash_local.loaded import SessionFacts
from dflash_local.request import Request
from dflash_local.service.service import Session

Observer = Callable[[Request, Event], None]


class WrappedSession:
    """A session that is another one but for what a subclass changes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def facts(self) -> SessionFacts:
        """What was loaded, and how."""
        return self._session.facts

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """See ``Session``."""
        return self._session.generate(request, cancelled)

    def close(self) -> None:
        """Release the session."""
        self._session.close()


class PlainSession(WrappedSession):
    """Every request in mode ``ar``: the drafter was left out although drafting was requested."""

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Without drafts."""
        return super().generate(replace(request, mode="ar", block_size=None), cancelled)


class TwoSessions(WrappedSession):
    """Requests in mode ``ar`` go to another session, which holds the same target and does not draft."""

    def __init__(self, drafted: Session, plain: Session) -> None:
        super().__init__(drafted)
        self.plain = plain

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """By the session that the request's mode asks for."""
        if request.mode == "ar":
            return self.plain.generate(replace(request, block_size=None), cancelled)
        return super().generate(request, cancelled)

    def close(self) -> None:
        """Release both."""
        super().close()
        self.plain.close()


class WatchedSession(WrappedSession):
    """Reports every event before it is yielded; ``active`` while a prompt is prepared or a reply made."""

    def __init__(self, session: Session, happened: Observer, ended: Callable[[], None]) -> None:
        super().__init__(session)
        self._happened, self._ended = happened, ended
        self.active = False

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The prompt is prepared in the call."""
        self.active = True
        with ExitStack() as stack:
            stack.callback(self._end)
            events = super().generate(request, cancelled)
            stack.pop_all()
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
