"""The figures of a finished reply in words; all of them come from ``Stats``."""

from __future__ import annotations

from dflash_local.events import Finished


def figures(finished: Finished) -> str:
    """One line: speed, both acceptance lengths by name, and the rows verified where they were fewer than the block."""
    stats, usage = finished.stats, finished.usage
    parts = [f"{usage.completion_tokens} tokens", f"{stats.tokens_per_s:.1f} tok/s"]
    if stats.mean_acceptance_length is not None:
        parts.append(f"acceptance length {stats.mean_acceptance_length:.2f} per cycle")
        if stats.turn_acceptance_length is not None:
            cycles = len(stats.acceptance_lengths) + stats.undrafted_cycles
            parts.append(f"{stats.turn_acceptance_length:.2f} per turn ({cycles} cycles)")
    if stats.mode == "dflash" and stats.mean_verify_rows not in (None, stats.block_size):
        parts.append(f"{stats.mean_verify_rows:.1f} of {stats.block_size} rows verified")
    if stats.copied_cycles and stats.copied_cycles < len(stats.acceptance_lengths):
        parts.append(f"drafts of {stats.copied_cycles} cycles copied from the text")
    if stats.mtp_cycles:
        parts.append(f"of {stats.mtp_cycles} cycles by the target's MTP layer")
    if stats.distinct_experts:
        counts = ", ".join(f"{count:.0f} at {rows}" for rows, count in stats.distinct_experts)
        parts.append(f"different experts a layer by rows: {counts}")
    parts.append(f"{stats.end_to_end_tokens_per_s:.1f} tok/s with the prompt")
    parts.append(finished.reason)
    return ", ".join(parts)


def histogram(finished: Finished, bar: str, width: int = 40) -> list[str]:
    """The acceptance lengths of a reply as lines of bars, one for each length up to the block."""
    lengths = finished.stats.acceptance_lengths
    if not lengths:
        return []
    counts = {n: lengths.count(n) for n in range(1, max(*lengths, finished.stats.block_size) + 1)}
    most = max(counts.values())
    return [f"{n:3d} {bar * round(width * count / most)} {count}" for n, count in counts.items()]
