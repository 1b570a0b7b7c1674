"""The figures of replies in words, the same on the terminal screen and the page."""

from __future__ import annotations

from dflash_local.ui.readings import Readings

NONE = "–"
NO_DRAFTS = "no drafts in this mode"


def rate(value: float | None) -> str:
    """Write tokens per second; a dash where they are not known."""
    return NONE if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def reply_line(readings: Readings) -> str:
    """Write the figures of a finished reply that matter most."""
    stats = readings.stats
    parts = [f"{readings.tokens} tokens", f"{rate(readings.mean)} tok/s"]
    if readings.acceptance_mean is not None:
        parts.append(f"acceptance {readings.acceptance_mean:.2f}")
    elif readings.mode == "ar":
        parts.append("without drafting")
    if readings.speed_up is not None:
        parts.append(f"{readings.speed_up:.2f}x AR")
    return " · ".join([*parts, f"seed {stats.seed}"] if stats is not None else parts)


def versus(readings: Readings) -> str:
    """Compare with this machine's own AR step, when one was seen."""
    if readings.ar_speed is None:
        return "AR here: unknown until a race"
    ratio = f", {readings.speed_up:.2f}x" if readings.speed_up is not None else ""
    return f"AR here: {rate(readings.ar_speed)} tok/s{ratio}"


def lengths(readings: Readings) -> tuple[str, str, str]:
    """Write the acceptance length now, on average, and of how many it could be."""
    now, mean = (NONE if n is None else f"{n:.2f}" for n in (readings.acceptance_now, readings.acceptance_mean))
    return now, mean, f" of {readings.block_size}" if readings.block_size else ""


def no_positions(readings: Readings) -> str:
    """Say why no share of accepted drafts is shown."""
    if readings.mode == "ar":
        return NO_DRAFTS
    return "after the first drafts" if readings.stats is None else "not known of this reply"


def no_split(readings: Readings) -> str:
    """Say why it is not shown where the time of the reply went."""
    return "at its end" if readings.stats is None else "not known of this reply"


def context(readings: Readings) -> str:
    """Write how much of the context is taken."""
    return f"{readings.used:,} of {readings.context:,} tokens"
