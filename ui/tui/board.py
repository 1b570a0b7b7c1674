"""Draws the figures of a chat: its title, the line below it, the panel; the panel less often than the text."""

from __future__ import annotations

import time

from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from dflash_local.app.chat_session import ChatSession
from dflash_local.terminal import safe_line
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui.widgets.meter import Meter, one_line

METER_S = 0.1  # figures that change faster cannot be read


class Board:
    """What a chat screen says of its pair and of the reply that runs."""

    def __init__(self, screen: Screen[None], session: ChatSession, readings: Readings) -> None:
        self._screen, self._session, self._readings = screen, session, readings
        self._drawn = -METER_S
        self._later: Timer | None = None

    def draw(self, at_once: bool) -> None:
        """Show the figures as they are now; the panel a moment later unless ``at_once``."""
        pair, facts = self._session.pair, self._session.facts
        how = f" · {facts.loaded_as}" if facts is not None else ""
        mode = "" if self._readings.mode == "dflash" else " · without drafting (ar)"
        self._set_text("#title", safe_line(f"dflash · {pair.label}{how}{mode}"))
        self._set_text("#status", one_line(self._readings))
        due = self._drawn + METER_S - time.monotonic()
        if at_once or due <= 0:
            self._meter()
        elif self._later is None:
            self._later = self._screen.set_timer(due, self._meter)

    def _meter(self) -> None:
        if self._later is not None:
            self._later.stop()
            self._later = None
        self._drawn = time.monotonic()
        if self._screen.has_class("-wide") and self._screen.has_class("-metered"):
            self._screen.query_one(Meter).show(self._readings)

    def _set_text(self, where: str, text: str) -> None:
        place = self._screen.query_one(where, Static)
        if str(place.content) != text:
            place.update(Content(text), layout=False)
