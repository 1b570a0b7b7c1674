"""How near a quantised target is to its original, as a JSON-able dict and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_local.bench import provenance
from dflash_local.bench.fidelity import Distance, Row, Scored, rows
from dflash_local.bench.report import TOY, finite, header, table
from dflash_local.catalog.bundled import Pair
from dflash_local.loaded import SessionFacts

TITLES = ("kind", "positions", "mean KL", "median", "99 %", "top-1")


def fidelity_report(
    pair: Pair,
    facts: SessionFacts,
    original: Pair,
    original_facts: SessionFacts,
    texts: Sequence[Scored],
    distances: Sequence[Distance],
) -> dict[str, Any]:
    """Every figure, and what both targets are."""
    return finite(
        {
            **header("dflash bench --fidelity", pair, facts),
            "original": {
                "target": asdict(provenance.folder_identity(original.target)),
                "engine": original_facts.engine,
                "weights": original_facts.weights,
                "load": asdict(original_facts.load),
            },
            "kept_bytes": kept_bytes(texts),
            "rows": [asdict(row) for row in rows(distances)],
            "prompts": [
                {"kind": text.kind, "prompt_tokens": len(text.prompt), "tokens": len(text.reply)} for text in texts
            ],
        }
    )


def kept_bytes(texts: Sequence[Scored]) -> int:
    """Bytes of the log-probabilities that waited in main memory."""
    return sum(text.log_probs.nbytes for text in texts)


def fidelity_lines(
    pair: Pair,
    facts: SessionFacts,
    original_facts: SessionFacts,
    texts: Sequence[Scored],
    distances: Sequence[Distance],
) -> list[str]:
    """The table and what the figures are."""
    lines = [
        f"{pair.label}: {facts.engine} engine, {facts.formats} on {facts.device}, "
        f"against the original in {original_facts.formats} ({original_facts.engine} engine)",
        "",
        *table(TITLES, [_cells(row) for row in rows(distances)]),
        "",
        "KL: of the original's next-token distribution to the quantised one's, in nats, over the whole vocabulary; "
        "top-1: positions with the same likeliest token",
        f"over the original's greedy replies, teacher-forced; {kept_bytes(texts) / 2**20:,.1f} MiB of its "
        "log-probabilities were kept meanwhile",
    ]
    return [*lines, f"({TOY})"] if pair.toy else lines


def _cells(row: Row) -> tuple[str, ...]:
    figures = (f"{value:.3g}" for value in (row.mean_kl, row.median_kl, row.p99_kl))
    return (row.kind, str(row.positions), *figures, f"{row.top_1:.2%}")
