"""The figures beside a conversation, as HTML: speed, acceptance, where the time goes, context, promise."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.ui.readings import Readings
from dflash_local.ui.web.markup import word

NONE = "–"
WIDE, HIGH = 280, 60  # of the curve, in its own units


def figures(readings: Readings, curve: Sequence[tuple[float, float]] = ()) -> str:
    """The whole panel."""
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


def one_line(readings: Readings) -> str:
    """The figures of a reply that matter most."""
    stats = readings.stats
    parts = [f"{readings.tokens} tokens", f"{rate(readings.mean)} tok/s"]
    if readings.acceptance_mean is not None:
        parts.append(f"acceptance {readings.acceptance_mean:.2f}")
    elif readings.mode == "ar":
        parts.append("without drafting")
    if readings.speed_up is not None:
        parts.append(f"{readings.speed_up:.2f}x AR")
    return " · ".join([*parts, f"seed {stats.seed}"] if stats is not None else parts)


def rate(value: float | None) -> str:
    """Tokens per second."""
    return NONE if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _part(title: str, content: str) -> str:
    return f"<section><h3>{title}</h3>{content}</section>"


def _line(text: str) -> str:
    return f"<p>{word(text)}</p>"


def _pair(now: str, mean: str, unit: str) -> str:
    return f'<p class="df-two"><b>{now}</b> now <b>{mean}</b> mean{unit}</p>'


def _speed(readings: Readings) -> str:
    against = "AR here: unknown until a reply or a race without drafting"
    if readings.ar_speed is not None:
        times = f", {readings.speed_up:.2f}x" if readings.speed_up is not None else ""
        against = f"AR here: {rate(readings.ar_speed)} tok/s{times}"
    return _pair(rate(readings.now), rate(readings.mean), " tok/s") + _line(against)


def _acceptance(readings: Readings) -> str:
    if readings.mode == "ar":
        return _line("no drafts in this mode")
    now, mean = (
        NONE if value is None else f"{value:.2f}" for value in (readings.acceptance_now, readings.acceptance_mean)
    )
    rows = "".join(map(_line, readings.verifying))
    return _pair(now, mean, f" of {readings.block_size}" if readings.block_size else "") + rows


def _positions(readings: Readings) -> str:
    if readings.mode == "ar":
        return _line("no drafts in this mode")
    if not readings.per_position:
        return _line("after the first drafts" if readings.stats is None else "not known of this reply")
    return "".join(bar(f"{slot}", share) for slot, share in enumerate(readings.per_position, start=1))


def bar(label: str, share: float) -> str:
    """A share as a bar with its number."""
    percent = round(100 * min(max(share, 0.0), 1.0))
    return (
        f'<div class="df-share"><span>{word(label)}</span>'
        f'<div class="df-track"><div style="width:{percent}%"></div></div><span>{percent}%</span></div>'
    )


def _split(readings: Readings) -> str:
    if readings.split is None:
        return _line("at its end" if readings.stats is None else "not known of this reply")
    return "".join(bar(name, share) for name, share in zip(("draft", "verify", "other"), readings.split))


def _context(readings: Readings) -> str:
    if not readings.context:
        return _line("unknown until the pair is loaded")
    text = f"{readings.used:,} of {readings.context:,} tokens"
    return bar("used", readings.used / readings.context) + _line(text)


def _curve(curve: Sequence[tuple[float, float]]) -> str:
    """Tokens per second over the seconds of the reply."""
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
