"""The comparison of AR and DFlash as a JSON-able dict and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_local.bench.report import TOY, finite, header, number, table
from dflash_local.bench.speed import Comparison, Row, SpeedOptions, rows
from dflash_local.bench.trial import Written
from dflash_local.catalog.bundled import Pair
from dflash_local.loaded import SessionFacts

TITLES = (
    "kind",
    "prompts",
    "tokens",
    "per cycle",
    "per turn",
    "AR tok/s",
    "DFlash tok/s",
    "ratio",
    "equal",
    "right",
)


def speed_report(
    pair: Pair, facts: SessionFacts, comparisons: Sequence[Comparison], options: SpeedOptions
) -> dict[str, Any]:
    """Every figure, per kind and per prompt."""
    return finite(
        {
            **header("dflash bench", pair, facts),
            "block_size": options.block_size or facts.block_size,
            "max_new_tokens": options.max_new_tokens,
            "rows": [asdict(row) for row in rows(comparisons)],
            "prompts": [
                {
                    "kind": one.prompt.kind,
                    "prompt_tokens": len(one.ids),
                    "equal": one.equal,
                    "ar": _written(one, one.ar),
                    "dflash": _written(one, one.dflash),
                }
                for one in comparisons
            ],
        }
    )


def _written(one: Comparison, written: Written) -> dict[str, Any]:
    stats = written.stats
    return {
        "tokens": len(written.ids),
        "finish_reason": written.reason,
        "right": one.right(written),
        "acceptance_lengths": list(stats.acceptance_lengths),
        "verify_rows": dict(stats.verify_rows),
        "tokens_per_s": stats.tokens_per_s,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "notices": list(written.notices),
    }


def speed_lines(pair: Pair, facts: SessionFacts, comparisons: Sequence[Comparison], options: SpeedOptions) -> list[str]:
    """The table, the acceptance of each position, and what the figures are."""
    figures = rows(comparisons)
    last = figures[-1]
    block = options.block_size or facts.block_size
    lines = [
        f"{pair.label}: {facts.engine} engine, {facts.formats} on {facts.device}, block {block}, greedy",
        "",
        *table(TITLES, [_cells(row) for row in figures]),
        "",
        "accepted per position: " + " ".join(f"{share:.0%}" for share in last.acceptance_per_position),
        f"text equal in {last.equal} of {last.prompts}"
        + (f"; answers right in {last.dflash_right} of {last.answers}" if last.answers else ""),
        "acceptance length: accepted drafts + 1, mean over cycles that drafted, and tokens / cycles of each reply; "
        "ratio: decode time of AR / DFlash in this run",
    ]
    lines += [f"notice: {notice}" for notice in sorted({n for one in comparisons for n in one.dflash.notices})]
    return [*lines, f"({TOY})"] if pair.toy else lines


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.kind,
        str(row.prompts),
        str(row.tokens),
        number(row.mean_acceptance_length, 2),
        number(row.turn_acceptance_length, 2),
        f"{row.ar_tokens_per_s:.1f}",
        f"{row.dflash_tokens_per_s:.1f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
        f"{row.equal}/{row.prompts}",
        f"{row.dflash_right}/{row.answers}" if row.answers else "-",
    )
