"""The figures of a finished reply in words; all of them come from ``Stats``."""

from __future__ import annotations

from dflash_local.events import Finished, Mode, Stats
from dflash_local.service.race import tokens_a_step
from dflash_local.tables import counted


def headline(finished: Finished) -> str:
    """The one line behind a reply, the same on every screen: what is not known is left out."""
    stats, length = finished.stats, tokens_a_step(finished.stats)
    up = speed_up(stats.mode, stats.tokens_per_s, stats.plain_step_s)
    parts = (
        counted(finished.usage.completion_tokens, "token") if finished.usage.completion_tokens else None,
        f"{short(stats.tokens_per_s)} tok/s" if stats.tokens_per_s else None,
        None if up is None else f"{up:.1f}x",
        "plain" if stats.mode == "ar" else None if length is None else f"{length:.1f} a step",
        f"first token {short_time(stats.ttft_s)}" if stats.ttft_s else None,
    )
    return " · ".join(filter(None, parts))


def speed_up(mode: Mode, tokens_per_s: float | None, plain_step_s: float | None) -> float | None:
    """How much faster a drafted reply is than the same load's plain step makes one; None where that is not known."""
    return None if mode == "ar" or not tokens_per_s or plain_step_s is None else tokens_per_s * plain_step_s


def plain_step(stats: Stats) -> str:
    """The step that the speed-up is counted against, with its source; empty where it is not known."""
    if stats.plain_step_s is None:
        return ""
    return f"plain step {1e3 * stats.plain_step_s:.1f} ms ({short(1 / stats.plain_step_s)} tok/s), {stats.plain_from}"


def short(value: float) -> str:
    """A rate as it is read at a glance: whole from 10 on."""
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def short_time(seconds: float) -> str:
    """Seconds, or milliseconds where they are few."""
    return f"{seconds:.1f} s" if seconds >= 0.095 else f"{1e3 * seconds:.0f} ms"


def details(finished: Finished) -> list[str]:
    """All that the line leaves out, for who asks: how drafts were made and accepted, times, the seed."""
    stats = finished.stats
    lines = [f"mode {mode_name(stats)}, block {stats.block_size or '-'}, seed {stats.seed}"]
    if known := plain_step(stats):
        lines.append(known)
    if stats.mean_acceptance_length is not None:
        lines.append(f"acceptance length {stats.mean_acceptance_length:.2f} per cycle")
        if stats.turn_acceptance_length is not None:
            cycles = len(stats.acceptance_lengths) + stats.undrafted_cycles
            undrafted = f", {stats.undrafted_cycles} without drafts" if stats.undrafted_cycles else ""
            lines[-1] += f", {stats.turn_acceptance_length:.2f} per turn ({cycles} cycles{undrafted})"
    if stats.mode == "dflash" and stats.mean_verify_rows not in (None, stats.block_size):
        lines.append(f"{stats.mean_verify_rows:.1f} of {stats.block_size} rows verified")
    if stats.copied_cycles and stats.copied_cycles < len(stats.acceptance_lengths):
        lines.append(f"drafts of {stats.copied_cycles} cycles copied from the text")
    if stats.mtp_cycles:
        lines.append(f"of {stats.mtp_cycles} cycles by the target's MTP layer")
    if stats.distinct_experts:
        counts = ", ".join(f"{count:.0f} at {rows}" for rows, count in stats.distinct_experts)
        lines.append(f"different experts a layer by rows: {counts}")
    rate = stats.end_to_end_tokens_per_s
    parts = (
        f"first token after {stats.ttft_s:.3f} s" if stats.ttft_s else None,
        f"{rate:.1f} tok/s with the prompt" if rate else None,
    )
    times = ", ".join(filter(None, parts))
    if stats.draft_s or stats.verify_s or stats.other_s:  # a server reports no phases
        times += f"; draft {stats.draft_s:.3f} s, verify {stats.verify_s:.3f} s, other {stats.other_s:.3f} s"
    return [*lines, times] if times else lines


def mode_name(stats: Stats) -> str:
    """What the mode is called where it is read."""
    return "plain" if stats.mode == "ar" else stats.mode


def histogram(finished: Finished, bar: str, width: int = 40) -> list[str]:
    """The acceptance lengths of a reply as lines of bars, one for each length up to the block."""
    lengths = finished.stats.acceptance_lengths
    if not lengths:
        return []
    counts = {n: lengths.count(n) for n in range(1, max(*lengths, finished.stats.block_size) + 1)}
    most = max(counts.values())
    return [f"{n:3d} {bar * round(width * count / most)} {count}" for n, count in counts.items()]
