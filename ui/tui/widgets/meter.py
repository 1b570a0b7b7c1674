"""The panel of figures beside a conversation: speed, acceptance, where the time goes, context, promise."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Sparkline, Static

from dflash_local.terminal import byte_size, safe_line
from dflash_local.ui.reading_text import NO_DRAFTS, NONE, context, lengths, no_positions, no_split, rate, versus
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui.widgets.bars import bar, position_lines, split_line

WIDTH = 33  # cells of a line in the panel


class Meter(VerticalScroll, can_focus=False):
    """Draws ``Readings``; keeps none of its own."""

    def compose(self) -> ComposeResult:
        yield Static("", id="alarms", markup=False)
        yield Static("Speed", classes="heading")
        yield Static("", id="speed", markup=False)
        yield Sparkline([], id="spark")
        yield Static("", id="versus", markup=False)
        yield Static("Acceptance length", classes="heading")
        yield Static("", id="acceptance", markup=False)
        yield Static("Accepted per draft position", classes="heading")
        yield Static("", id="positions", markup=False)
        yield Static("Time of the reply", classes="heading")
        yield Static("", id="split", markup=False)
        yield Static("Context", classes="heading")
        yield Static("", id="context", markup=False)
        yield Static("Memory", classes="heading", id="memory-of", markup=False)
        yield Static("", id="memory", markup=False)
        yield Static("", id="precision", markup=False)

    def show(self, readings: Readings) -> None:
        self._put("speed", f"{rate(readings.now)} now  {rate(readings.mean)} mean tok/s")
        # From nothing up, since it scales to its lowest; nothing alone would be drawn as the highest.
        self.query_one(Sparkline).data = [0.0, *readings.speeds] if readings.speeds else []
        self._put("versus", versus(readings))
        self._put("acceptance", acceptance(readings))
        self._put("positions", "\n".join(position_lines(readings.per_position, WIDTH)) or no_positions(readings))
        self._put("split", _split(readings))
        self._put("context", _context(readings))
        self._put("memory-of", f"Memory of {readings.memory.whose}" if readings.memory.whose else "Memory")
        self._put("memory", memory(readings))
        self._put("precision", readings.precision)
        self._put("alarms", "\n".join(f"▲ {safe_line(alarm)}" for alarm in readings.alarms))
        self.query_one("#alarms").display = bool(readings.alarms)

    def _put(self, name: str, text: str) -> None:
        place = self.query_one(f"#{name}", Static)
        before = str(place.content)
        if before != text:
            moves = name == "alarms" or before.count("\n") != text.count("\n") or not before
            place.update(Content(text), layout=moves)


def one_line(readings: Readings) -> str:
    """The figures that matter most, for a screen too narrow for the panel."""
    parts = [readings.state]
    if readings.mean is not None:
        parts.append(f"{readings.mean:.1f} tok/s")
    if readings.acceptance_mean is not None:
        parts.append(f"acceptance {readings.acceptance_mean:.2f}")
    if readings.alarms:  # before what a narrow screen may cut
        parts.append("▲ " + safe_line(readings.alarms[-1]))
    if readings.speed_up is not None:
        parts.append(f"{readings.speed_up:.2f}x AR")
    if readings.context:
        parts.append(f"ctx {readings.used:,}/{readings.context:,}")
    parts += [readings.precision] if readings.precision else []
    if readings.memory.used is not None and readings.memory.total:
        parts.append(f"mem {readings.memory.used / readings.memory.total:.0%}")
    return " · ".join(parts)


def acceptance(readings: Readings) -> str:
    """Acceptance length now and on average, and what a cycle verifies."""
    if readings.mode == "ar":
        return NO_DRAFTS
    now, mean, block = lengths(readings)
    return "\n".join((f"{now} now   {mean} mean{block}", *readings.verifying))


def _split(readings: Readings) -> str:
    if readings.split is None:
        return no_split(readings)
    draft, verify, other = readings.split
    line = split_line(readings.split, WIDTH)
    return f"{line}\n█draft {draft:.0%} ▓verify {verify:.0%} ░other {other:.0%}"


def _context(readings: Readings) -> str:
    if not readings.context:
        return NONE
    share = readings.used / readings.context
    return f"{_gauge(share)}\n{context(readings)} ({share:.0%})"


def memory(readings: Readings) -> str:
    """Used of total of what holds the pair, as a bar and in figures."""
    used, total = readings.memory.used, readings.memory.total
    if used is None or not total:
        return "unknown"
    return f"{_gauge(used / total)}\n{byte_size(used)} of {byte_size(total)} ({used / total:.0%})"


def _gauge(share: float) -> str:
    return bar(share, WIDTH).replace(" ", "░")
