"""The panel of figures beside a conversation, and the line that stands for it where the screen is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Sparkline, Static

from dflash_local.terminal import safe_line
from dflash_local.ui.figures import Figure, figures
from dflash_local.ui.readings import Readings

WIDTH = 33  # cells of a line in the panel
EIGHTHS = " ▏▎▍▌▋▊▉█"
ONE_COLUMN = 8  # bars below each other; a block of 16 has 15


class Meter(VerticalScroll, can_focus=False):
    """Draws ``Readings``; keeps none of its own."""

    def compose(self) -> ComposeResult:
        yield Static("", id="alarms", markup=False)
        for number, _ in enumerate(figures(Readings())):
            yield Static("", classes="figure")
            if not number:
                yield Sparkline([])

    def show(self, readings: Readings) -> None:
        """Draw the figures as they are now."""
        # From nothing up, since it scales to its lowest; nothing alone would be drawn as the highest.
        self.query_one(Sparkline).data = [0.0, *readings.speeds] if readings.speeds else []
        for place, figure in zip(self.query(".figure").results(Static), figures(readings), strict=True):
            _update(place, Content.assemble((figure.title, "bold"), "\n", "\n".join(figure_lines(figure))))
        alarms = self.query_one("#alarms", Static)
        _update(alarms, Content("\n".join(f"▲ {safe_line(alarm)}" for alarm in readings.alarms)))
        alarms.display = bool(readings.alarms)


def _update(place: Static, content: Content) -> None:
    """Draw what has changed; all is laid out anew only where the number of its lines is another."""
    before = str(place.content)
    if before != content.plain:
        place.update(content, layout=not before or before.count("\n") != content.plain.count("\n"))


def figure_lines(figure: Figure, width: int = WIDTH) -> list[str]:
    """Write a figure's words and bars as lines of at most ``width`` cells; many bars stand beside each other."""
    lines = ["{} now  {} mean {}".format(*figure.main).rstrip()] if figure.main is not None else []
    columns = 1 if len(figure.bars) <= ONE_COLUMN else 2
    label = max([2, *(len(name) for name, _ in figure.bars)])
    room = max(4, (width - columns + 1) // columns - label - 6)
    shown = [f"{name:>{label}} {bar(share, room)} {share:4.0%}" for name, share in figure.bars]
    height = -(-len(shown) // columns)
    return [*lines, *(" ".join(shown[at::height]) for at in range(height)), *map(safe_line, figure.lines)]


def bar(share: float, width: int) -> str:
    """Draw a bar that fills ``share`` (0..1) of ``width`` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def gauge(share: float, width: int) -> str:
    """Draw a bar whose end can be seen."""
    return bar(share, width).replace(" ", "░")


def one_line(readings: Readings) -> str:
    """Write the figures that matter most, for a screen too narrow for the panel."""
    memory = readings.memory
    parts: Sequence[str | None] = (
        readings.state,
        None if readings.mean is None else f"{readings.mean:.1f} tok/s",
        None if readings.acceptance_mean is None else f"acceptance {readings.acceptance_mean:.2f}",
        f"▲ {safe_line(readings.alarms[-1])}" if readings.alarms else None,  # before what a narrow screen may cut
        None if readings.speed_up is None else f"{readings.speed_up:.2f}x",
        f"ctx {readings.used:,}/{readings.context:,}" if readings.context else None,
        readings.precision,
        f"mem {memory.used / memory.total:.0%}" if memory.used is not None and memory.total else None,
    )
    return " · ".join(filter(None, parts))
