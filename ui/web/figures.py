"""The figures beside a conversation, as HTML: speed, acceptance, where the time goes, context, promise."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.ui.reading_text import NO_DRAFTS, context, lengths, no_positions, no_split, rate, versus
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.markup import word

WIDE, HIGH = 280, 60  # of the curve, in its own units


def figures(readings: Readings, curve: Sequence[tuple[float, float]] = ()) -> str:
    parts = [
        _part("Speed", _speed(readings) + _curve(curve)),
        _part("Acceptance length", _acceptance(readings)),
        _part("Accepted per draft position", _positions(readings)),
        _part("Time of the reply", _split(readings)),
        _part("Context", _context(readings)),
        _part("Promise", _line(readings.precision or "unknown until the pair is loaded")),
    ]
    alarms = "".join(f'<p class="df-alarm" role="alert">▲ {word(alarm)}</p>' for alarm in readings.alarms)
    return f'<div class="df-figures">{alarms}{"".join(parts)}</div>'


def _part(title: str, content: str) -> str:
    return f"<section><h3>{title}</h3>{content}</section>"


def _line(text: str) -> str:
    return f"<p>{word(text)}</p>"


def _pair(now: str, mean: str, unit: str) -> str:
    return f'<p class="df-two"><b>{now}</b> now <b>{mean}</b> mean{unit}</p>'


def _speed(readings: Readings) -> str:
    return _pair(rate(readings.now), rate(readings.mean), " tok/s") + _line(versus(readings))


def _acceptance(readings: Readings) -> str:
    if readings.mode == "ar":
        return _line(NO_DRAFTS)
    return _pair(*lengths(readings)) + "".join(map(_line, readings.verifying))


def _positions(readings: Readings) -> str:
    shares = enumerate(readings.per_position, start=1)
    return "".join(bar(f"{slot}", share) for slot, share in shares) or _line(no_positions(readings))


def bar(label: str, share: float) -> str:
    """Draw a share as a bar with its number."""
    percent = round(100 * min(max(share, 0.0), 1.0))
    return (
        f'<div class="df-share"><span>{word(label)}</span>'
        f'<div class="df-track"><div style="width:{percent}%"></div></div><span>{percent}%</span></div>'
    )


def _split(readings: Readings) -> str:
    if readings.split is None:
        return _line(no_split(readings))
    return "".join(bar(name, share) for name, share in zip(("draft", "verify", "other"), readings.split))


def _context(readings: Readings) -> str:
    if not readings.context:
        return _line("unknown until the pair is loaded")
    return bar("used", readings.used / readings.context) + _line(context(readings))


def _curve(curve: Sequence[tuple[float, float]]) -> str:
    """Draw tokens per second over the seconds of the reply."""
    if len(curve) < 2:
        return ""
    top, end = max(speed for _, speed in curve) or 1.0, curve[-1][0] or 1.0
    last = f"{end:.1f} s" if end >= 1 else f"{end:.2f} s"
    points = " ".join(f"{second / end * WIDE:.1f},{HIGH - speed / top * HIGH:.1f}" for second, speed in curve)
    return (
        f'<figure class="df-curve"><svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" '
        f'aria-label="tokens per second over {last}, at most {rate(top)}">'
        f'<polyline points="{points}"></polyline></svg>'
        f"<figcaption><span>0 s</span><span>tok/s, at most {rate(top)}</span><span>{last}</span></figcaption>"
        "</figure>"
    )
