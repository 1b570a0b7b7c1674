"""The figures beside a conversation, as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.service.race_lanes import speed_text
from dflash_local.ui.figures import Figure, figures
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.markup import word

WIDE, HIGH = 280, 60  # of the curve, in its own units


def panel(readings: Readings, curve: Sequence[tuple[float, float]] = ()) -> str:
    """Draw all of them; ``curve`` is of seconds and tokens per second over the reply."""
    alarms = "".join(f'<p class="df-alarm" role="alert">▲ {word(alarm)}</p>' for alarm in readings.alarms)
    known = [figure for figure in figures(readings) if figure.bars or not figure.title.startswith("Memory")]
    parts = "".join(_part(figure, "" if number else _curve(curve)) for number, figure in enumerate(known))
    return f'<div class="df-figures">{alarms}{parts}</div>'


def _part(figure: Figure, curve: str) -> str:
    main = ""
    if figure.main is not None:
        now, mean, unit = figure.main
        main = f'<p class="df-two"><b>{now}</b> now <b>{mean}</b> mean {unit}</p>'
    bars = "".join(_bar(name, share) for name, share in figure.bars)
    lines = "".join(f"<p>{word(line)}</p>" for line in figure.lines)
    return f"<section><h2>{word(figure.title)}</h2>{main}{bars}{lines}{curve}</section>"


def _bar(label: str, share: float) -> str:
    """Draw a share as a bar with its number."""
    percent = round(100 * min(max(share, 0.0), 1.0))
    return (
        f'<div class="df-share"><span>{word(label)}</span>'
        f'<div class="df-track"><div style="width:{percent}%"></div></div><span>{percent}%</span></div>'
    )


def _curve(curve: Sequence[tuple[float, float]]) -> str:
    """Draw tokens per second over the seconds of the reply."""
    if len(curve) < 2:
        return ""
    top, end = max(speed for _, speed in curve) or 1.0, curve[-1][0] or 1.0
    last = f"{end:.1f} s" if end >= 1 else f"{end:.2f} s"
    points = " ".join(f"{second / end * WIDE:.1f},{HIGH - speed / top * HIGH:.1f}" for second, speed in curve)
    return (
        f'<figure class="df-curve"><svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" '
        f'aria-label="tokens per second over {last}, at most {speed_text(top)}">'
        f'<polyline points="{points}"></polyline></svg>'
        f"<figcaption><span>0 s</span><span>tok/s, at most {speed_text(top)}</span><span>{last}</span></figcaption>"
        "</figure>"
    )
