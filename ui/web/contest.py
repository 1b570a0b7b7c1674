"""A race of one window: run first, each reply alone on the machine, then shown again as it went. Draws nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from dflash_local.errors import Interrupted
from dflash_local.events import Event, Finished, Mode, Queued, Step
from dflash_local.request import Request
from dflash_local.service.race import MODES, Lane, Race, Racer
from dflash_local.service.resident import Resident
from dflash_local.terminal import safe_line
from dflash_local.ui.safety import SafePieces

NAMES: dict[Mode, str] = {"ar": "without drafting (AR)", "dflash": "with the drafter (DFlash)"}


@dataclass(slots=True)
class Track:
    """How far one of the two is.

    Attributes:
        text: safe to show, thinking included. seconds: since its request started. done: all of it is here.
    """

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    done: bool = False
    _safe: SafePieces = field(default_factory=SafePieces)

    def take(self, step: Step) -> None:
        """One step more."""
        self.text += "".join(piece.text for piece in self._safe.feed(step.pieces))
        self.tokens += len(step.token_ids)
        self.seconds = step.t_s

    def end(self, seconds: float, tokens: int) -> None:
        """No step follows; a server that names no tokens tells only now how many there are."""
        self.text += "".join(piece.text for piece in self._safe.finish())
        self.tokens, self.seconds, self.done = max(self.tokens, tokens), seconds, True


class Contest:
    """One race. ``run`` is called on a thread, everything else from any thread."""

    def __init__(self, resident: Resident, request: Request) -> None:
        self.request = request
        self.tracks: dict[Mode, Track] = {mode: Track() for mode in MODES}
        self.version = 0
        self._resident = resident
        self._lock = threading.Lock()
        self._racer: Racer | None = None
        self._phase = ""
        self._stopped = threading.Event()

    def run(self) -> Race:
        """Load the pair if need be, and race.

        Raises:
            Interrupted: it was stopped. UsageError: there is no drafter. DFlashError: a request failed.
        """
        self._resident.load()
        racer = Racer(self._resident, self.request)
        with self._lock:
            self._racer = racer
            self._phase = "warming both up"
            self.version += 1
        if self._stopped.is_set():
            raise Interrupted("the race was stopped")
        return racer.run(self._on_event)

    def stop(self) -> None:
        """End it early."""
        self._stopped.set()
        with self._lock:
            racer = self._racer
        if racer is not None:
            racer.cancel()

    @property
    def stopped(self) -> bool:
        """True when ``stop`` was called."""
        return self._stopped.is_set()

    @property
    def state(self) -> str:
        """What is going on, in words."""
        load = self._resident.status.progress
        if self._racer is None:
            return (
                f"loading {self._resident.model.name}: {safe_line(load.stage)} {load.fraction:.0%}"
                if load
                else "waiting"
            )
        return self._phase

    def _on_event(self, mode: Mode, event: Event) -> None:
        with self._lock:
            track = self.tracks[mode]
            self._phase = f"running {NAMES[mode]}; each has the machine to itself, both are replayed together"
            if isinstance(event, Queued) and event.position:
                self._phase = f"waiting, {event.position} before"
            elif isinstance(event, Step):
                track.take(event)
            elif isinstance(event, Finished):
                track.end(event.stats.prefill_s + event.stats.decode_s, event.usage.completion_tokens)
                if mode == MODES[-1]:
                    self._phase = "comparing both"  # where they differ, the target is asked once more
            self.version += 1


class Replay:
    """Both lanes of a race again, side by side, at the speed they had."""

    def __init__(self, race: Race) -> None:
        self.tracks: dict[Mode, Track] = {mode: Track() for mode in MODES}
        self._left: dict[Mode, list[Step]] = {lane.mode: list(lane.steps) for lane in (race.ar, race.dflash)}
        self._lanes: dict[Mode, Lane] = {lane.mode: lane for lane in (race.ar, race.dflash)}
        self._begun = time.monotonic()

    @property
    def done(self) -> bool:
        """True when all of both is shown."""
        return all(track.done for track in self.tracks.values())

    def advance(self, seconds: float | None = None) -> None:
        """Show what had come by now, or by ``seconds``."""
        by = time.monotonic() - self._begun if seconds is None else seconds
        for mode, track in self.tracks.items():
            left, lane = self._left[mode], self._lanes[mode]
            while left and left[0].t_s <= by:
                track.take(left.pop(0))
            if not left and not track.done and by >= lane.seconds:
                track.end(lane.seconds, lane.tokens)
            elif not track.done:
                track.seconds = min(by, lane.seconds)
