"""A session whose drafter was left out although drafting was requested: its requests are answered without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dflash_local.events import Event
from dflash_local.loaded import SessionFacts
from dflash_local.request import Request
from dflash_local.service.service import Session


class PlainSession:
    """Every request in mode ``ar``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def facts(self) -> SessionFacts:
        """What was loaded, and how."""
        return self._session.facts

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """As the session's."""
        return self._session.generate(replace(request, mode="ar", block_size=None), cancelled)

    def close(self) -> None:
        """Release the session."""
        self._session.close()
