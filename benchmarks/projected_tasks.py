"""Projects a card's task table onto measured cycles: ``PYTHONPATH=. python benchmarks/projected_tasks.py RECORD.json``.

Takes a record of ``dflash bench MODEL --weights random``: tokens/s are its cycles times the acceptance lengths that are
published, prefill left out. No text was written: a projection, printed as Markdown beside the published cells.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_local.catalog import registry
from dflash_local.catalog.row import Published

TITLES = ("Task", "Block", "Acceptance length", "Published: plain", "DFlash", "Speed-up")
PROJECTED = ("Projected: plain", "DFlash", "Ratio")


def table(record: Mapping[str, Any], published: Sequence[Published]) -> list[str]:
    """Lines of Markdown; a row for every cell of single requests whose block the record has a cycle of.

    Raises:
        SystemExit: the record is none of random weights, or projects nothing that is published.
    """
    if record.get("report") != "dflash bench --weights random":
        raise SystemExit("this is no record of dflash bench MODEL --weights random")
    cells = {(cell.task, cell.block, cell.source): cell for cell in published if cell.concurrency == 1}
    rows, sources, contexts = [], [], []
    for found in record["projected"][:1]:
        plain = found["ar_tokens_per_s"]
        contexts.append(found["context"])
        for cycle in found["cycles"]:
            cell = cells.get((cycle.get("task"), cycle["rows"], cycle.get("source")))
            if cell is None:
                continue
            sources.append(cell.source)
            there = (_whole(cell.plain_tokens_per_s), _whole(cell.tokens_per_s), _times(cell.speedup))
            here = (_whole(plain), _whole(cycle["tokens_per_s"]), _times(cycle["ratio"]))
            rows.append((cell.task, str(cell.block), f"{cycle['acceptance_length']:.2f}", *there, *here))
    if not rows:
        raise SystemExit("the record has no cycle at a published acceptance length")
    lines = [(*TITLES, *PROJECTED), ["---"] * (len(TITLES) + len(PROJECTED)), *sorted(rows, key=_order)]
    return [
        *(f"| {' | '.join(cells)} |" for cells in lines),
        "",
        f"Projection, not a measurement of text: {record['pair']} with random weights, {record['engine']} engine, "
        f"{record['dtype']}, drafter {record['generation']} ({record['draft_side']}), {record['card']}, "
        f"{contexts[0]:,} tokens of context, without prefill. Published: {'; '.join(dict.fromkeys(sources))}.",
    ]


def _order(row: tuple[str, ...]) -> tuple[int, float]:
    return int(row[1]), float(row[2])


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x"


def main(path: str) -> None:
    """Print the table of a record."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    row = registry.load().find(record.get("pair", ""))
    print("\n".join(table(record, () if row is None else row.published)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit((__doc__ or "").partition("\n")[0])
    main(sys.argv[1])
