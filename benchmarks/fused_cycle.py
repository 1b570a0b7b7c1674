"""``dflash bench PAIR --weights random`` for a machine without the command line's libraries.

    PYTHONPATH=. python benchmarks/fused_cycle.py Qwen/Qwen3-8B --context 1024 --prefill 8192 --out FILE.json

Random weights of the pair's true shapes, no download, one CUDA GPU; the modules, figures and labels are the command's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dflash_local.bench import random_report, random_run
from dflash_local.bench.baselines import run_all, tasks
from dflash_local.bench.random_pair import of_row
from dflash_local.catalog import registry


def main() -> None:
    """Measure one pair of the registry and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="committed tokens to measure at")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt to time")
    parser.add_argument("--drafter-precision", default="auto", help="how drafts are computed")
    parser.add_argument("--baselines", action="store_true", help="transformers and the reference engine beside it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    row = registry.load().find(args.model)
    if row is None:
        raise SystemExit(f"{args.model} is no pair of the registry")
    pair = of_row(row)
    block = pair.config.block_size
    stated = random_report.assumption((), row.published, block)
    measures = random_run.Measures(
        tuple(args.context), random_run.rows_of(block, stated.rows), args.prefill, args.drafter_precision
    )
    place = random_run.gpu("auto", "auto")
    found = random_run.measure(pair, measures, place, lambda _text, _part: None)
    others = tuple(run_all(tasks(pair, measures.contexts[0], place))) if args.baselines else ()
    print("\n".join(random_report.random_lines(pair, measures, place, found, stated, others)))
    if args.out is not None:
        report = random_report.random_report(pair, measures, place, found, stated, others)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
