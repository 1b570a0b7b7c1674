"""The figures of replies in words and shares, the same on the terminal screen and the page."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.app.reply_text import short_time
from dflash_local.service.race_lanes import speed_text
from dflash_local.terminal import byte_size
from dflash_local.ui.readings import Readings

NONE = "–"
NO_DRAFTS = "no drafts in this mode"


@dataclass(frozen=True, slots=True)
class Figure:
    """One part of the panel.

    Attributes:
        main: the figure now, on average, and its unit. bars: names and their shares (0..1). lines: what is said below.
    """

    title: str
    lines: tuple[str, ...] = ()
    bars: tuple[tuple[str, float], ...] = ()
    main: tuple[str, str, str] | None = None


def figures(readings: Readings) -> list[Figure]:
    """Tell all of them, always as many in the same order."""
    drafted = Figure("Acceptance length", (NO_DRAFTS,))
    if readings.mode != "ar":
        now, mean = (NONE if n is None else f"{n:.2f}" for n in (readings.acceptance_now, readings.acceptance_mean))
        longest = max(readings.block_size, len(readings.per_position) + 1)  # copies may be longer than a block
        unit = f"of {longest}" if readings.block_size else ""
        lines = (*readings.verifying, *_per_turn(readings))
        drafted = Figure("Acceptance length", lines, main=(now, mean, unit))
    unknown = "not known of this reply"
    places = tuple((f"{slot}", share) for slot, share in enumerate(readings.per_position, 1))
    why = NO_DRAFTS if readings.mode == "ar" else "after the first drafts" if readings.stats is None else unknown
    when = "at its end" if readings.stats is None else unknown
    split = tuple(zip(("draft", "verify", "other"), readings.split or ()))
    return [
        Figure("Speed", _plain(readings), main=(speed_text(readings.now), speed_text(readings.mean), "tok/s")),
        drafted,
        Figure("Accepted per draft position", () if places else (why,), places),
        Figure("Time of the reply", (*(() if split else (when,)), *_of_reply(readings)), split),
        _context(readings),
        _memory(readings),
        Figure("Promise", (readings.precision or "unknown until the pair is loaded",)),
    ]


def _plain(readings: Readings) -> tuple[str, ...]:
    """Compare with the loaded pair's own plain step, and say when that was measured."""
    step = readings.plain_step_s
    if step is None:
        return ("plain: not measured",)
    ratio = f", {readings.speed_up:.2f}x" if readings.speed_up is not None else ""
    return f"plain: {speed_text(1 / step)} tok/s{ratio}", f"{1e3 * step:.1f} ms a step, {readings.plain_from}"


def _per_turn(readings: Readings) -> tuple[str, ...]:
    length = None if readings.stats is None else readings.stats.turn_acceptance_length
    return () if length is None else (f"{length:.2f} per turn",)


def _of_reply(readings: Readings) -> tuple[str, ...]:
    stats = readings.stats
    return () if stats is None else (f"first token {short_time(stats.ttft_s)}", f"seed {stats.seed}")


def _context(readings: Readings) -> Figure:
    if not readings.context:
        return Figure("Context", ("unknown until the pair is loaded",))
    used = (("used", readings.used / readings.context),)
    return Figure("Context", (f"{readings.used:,} of {readings.context:,} tokens",), used)


def _memory(readings: Readings) -> Figure:
    """Tell how full the memory is that holds the pair."""
    used, total, whose = readings.memory.used, readings.memory.total, readings.memory.whose
    title = f"Memory of {whose}" if whose else "Memory"
    if used is None or not total:
        return Figure(title, ("unknown",))
    return Figure(title, (f"{byte_size(used)} of {byte_size(total)}",), (("used", used / total),))
