"""What the convolutions and the selector of a DFlash 2 drafter cost a cycle, over random weights on one CUDA GPU.

    PYTHONPATH=. python benchmarks/dflash2_cycle.py --out FILE.json

Of one target's shape in bf16 and int4: its DFlash 2 drafter; the same drafter without convolutions and selector, which
is a DFlash one; the published one in W4A16; and the DFlash drafter of the registry's target of the same shape, whose
block is another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed_table import stored_as
from dflash_local.bench import random_run
from dflash_local.bench.provenance import machine, versions
from dflash_local.bench.random_pair import RandomPair, of_row
from dflash_local.catalog import registry
from dflash_local.catalog.shapes import shape
from dflash_local.config.drafter_config import DrafterConfig

SECOND, FIRST = "qwen3.8-27b", "qwen3.6-27b"
CODED = "syvai/Qwen3.8-27B-DFlash2-W4A16"
FORMATS = {"bf16": None, "int4": "int4-g128"}


def pairs() -> dict[str, RandomPair]:
    """By what is measured of each."""
    rows = registry.load()
    found = []
    for name in (SECOND, FIRST):
        row = rows.find(name)
        if row is None:
            raise SystemExit(f"{name} is no pair of the registry")
        found.append(of_row(row))
    second, first = found
    plain = replace(second, config=replace(second.config, dflash2=None))
    config = DrafterConfig.from_shape(shape(CODED) or {}, CODED)
    return {
        f"{SECOND}, DFlash 2": second,
        f"{SECOND}, without its parts": plain,
        f"{SECOND}, W4A16": replace(second, config=config),
        f"{FIRST}, DFlash": first,
    }


def measured(pair: RandomPair, context: int, precision: str) -> dict[str, Any]:
    """Milliseconds of a step, a draft and a cycle."""
    block = pair.config.block_size
    measures = random_run.Measures((context,), tuple(sorted({1, 8, block})), 0, precision)
    found = random_run.measure(pair, measures, random_run.gpu("auto", "auto"), lambda _text, _part: None)
    at = found.at[0]
    return {
        "block": block,
        "step_ms": at.step.ms,
        "draft_ms": at.draft.ms,
        "context_rows_ms": at.inject.ms,
        "verify_ms": {str(rows): figure.ms for rows, figure in at.verify.items()},
        "cycle_ms": {str(rows): figure.ms for rows, figure in at.cycle.items()},
        "peak_bytes": found.peak,
        "drafter_precision": found.drafter_precision,
    }


def table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: milliseconds."""
    lines = ["| pair | format | block | step | draft | cycle of 8 rows | cycle |", "|" + " --- |" * 7]
    for entry in entries:
        at = entry["measured"]
        cells = [at["step_ms"], at["draft_ms"], at["cycle_ms"]["8"], at["cycle_ms"][str(at["block"])]]
        times = " | ".join(f"{ms:.3f}" for ms in cells)
        lines.append(f"| {entry['pair']} | {entry['format']} | {at['block']} | {times} |")
    return lines


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafter-precision", default="8bit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    entries: list[dict[str, Any]] = []
    for form, stored in FORMATS.items():
        for name, pair in pairs().items():
            found = measured(replace(pair, model=stored_as(pair.model, stored)), args.context, args.drafter_precision)
            entries.append({"pair": name, "format": form, "measured": found})
            print(table(entries)[-1], flush=True)
    print("\n".join(table(entries)))
    for form in FORMATS:
        second, plain, *_others = (entry["measured"] for entry in entries if entry["format"] == form)
        print(f"{form}: convolutions and selector take {second['cycle_ms']['8'] - plain['cycle_ms']['8']:.3f} ms")
    if args.out is not None:
        record = {"random_weights": True, "context": args.context, "entries": entries}
        args.out.write_text(json.dumps(record | {"machine": machine(), "versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
