"""A race of one window: run first, each reply alone on the machine, then shown again as it went. Draws nothing."""

from __future__ import annotations

import threading

from dflash_local.errors import Interrupted
from dflash_local.events import Event, Finished, Mode, Queued, Step
from dflash_local.request import Request
from dflash_local.service.race import MODES, Race, Racer
from dflash_local.service.service import Service
from dflash_local.ui.replay import COMPARING, RUNNING, Track
from dflash_local.ui.web.jobs import Job
from dflash_local.ui.web.reply import waiting_for


class Contest(Job[Race]):
    """One race on its thread; it loads the pair if need be. It may be looked at from any thread.

    Attributes:
        stopped: it was asked to end. version: grows with everything that came.
    """

    def __init__(self, service: Service, request: Request) -> None:
        self.tracks: dict[Mode, Track] = {mode: Track() for mode in MODES}
        self.version = 0
        self._service, self._request = service, request
        self._lock = threading.Lock()
        self._racer: Racer | None = None
        self._phase = "warming both up"
        self.stopped = False
        super().__init__(self._race, self._end)

    def _race(self) -> Race:
        self._service.load()
        self._racer = racer = Racer(self._service, self._request)
        if self.stopped:
            raise Interrupted("the race was stopped")
        return racer.run(self._on_event)

    def _end(self) -> None:
        self.stopped = True
        if self._racer is not None:
            self._racer.cancel()

    @property
    def state(self) -> str:
        """Says what is going on."""
        return waiting_for(self._service) if self._racer is None else self._phase

    def _on_event(self, mode: Mode, event: Event) -> None:
        with self._lock:
            track = self.tracks[mode]
            self._phase = RUNNING[mode]
            if isinstance(event, Queued) and event.position:
                self._phase = f"waiting, {event.position} before"
            elif isinstance(event, Step):
                track.take(event)
            elif isinstance(event, Finished):
                track.end(event)
                if mode == MODES[-1]:
                    self._phase = COMPARING
            self.version += 1
