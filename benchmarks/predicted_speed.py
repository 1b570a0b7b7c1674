"""What plans predict beside what a card measured: step, cycle and memory of pairs with random weights. Needs no GPU.

    PYTHONPATH=. python benchmarks/predicted_speed.py benchmarks/results/h100_predicted_speed.json
    PYTHONPATH=. python benchmarks/predicted_speed.py REPORT.json ... --out RECORD.json

Predictions are today's for the card of the record, by the probe that comes with the program. A new record is made of
the reports of ``dflash bench NAME --weights random[:FORMAT] --drafter-precision 8bit --context 1024 --context 8192
--prefill 8192 --report REPORT.json``, of each pair in bfloat16, fp8 and int4-g128.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed_table import STORED as FORMATS
from benchmarks.speed_table import form_of, known_pair, stored_as
from dflash_local.bench.random_run import SLACK
from dflash_local.layout.cycle import prompt_chunk
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import plan
from dflash_local.planner.speed import predict

KINDS = {
    "qwen3-8b": "dense",
    "qwen3.5-9b": "hybrid",
    "qwen3-coder-30b-a3b": "experts",
    "qwen3.5-35b-a3b": "hybrid, experts",
}
PREFILL = 8192  # as long as the longest context that is measured
LOAD = LoadConfig(drafter_precision="8bit", context=PREFILL + SLACK, offload="none")
MEMORY = 141 * 2**30  # of a card of which only the name is known


def planned(name: str, stored: str | None, machine: Machine, chunk: int | None = None) -> dict[str, Any]:
    """The plan's peak and times of a pair, in a format of ``FORMATS``, on a card with all of its memory free."""
    known = known_pair(name)
    target = stored_as(known.target, stored)
    found = plan(target, known.drafter, machine, replace(LOAD, prefill_chunk=prompt_chunk(target, PREFILL, chunk)))
    prediction = predict(found, target, known.drafter)
    if prediction is None:
        raise SystemExit(f"{name}: nothing is predicted of {found.engine} in {found.dtype} on {machine.name}")
    times = {str(each.context): {"step_ms": each.step_ms, "cycle_ms": each.cycle_ms} for each in prediction.times}
    return {"basis": prediction.basis, "peak_bytes": found.ledger.peak, "at": times}


def measured(report: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a record: what is compared of a report of ``dflash bench --weights random``."""
    name = next((name for name in KINDS if known_pair(name).target.source == report["target"]), None)
    form = form_of(report)
    if name is None or form is None:
        raise SystemExit(f"{report['target']} as {report['stored']} is not compared here")
    found, block = report["measured"], str(report["block_size"])
    times = {
        str(at["context"]): {"step_ms": at["ar_step"]["ms"], "cycle_ms": at["cycle"][block]["ms"]} for at in found["at"]
    }
    kept = {name: report[name] for name in ("card", "versions")} | {"chunk": found["prefill"].get("chunk")}
    kept |= {"peak_bytes": found["peak_bytes"], "at": times}
    return {"pair": name, "kind": KINDS[name], "format": form, "measured": kept}


def errors(entry: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over measured, less one, of each figure that both have."""
    before, after = entry["planned"], entry["measured"]
    found = {"memory": before["peak_bytes"] / after["peak_bytes"] - 1}
    for context, at in after["at"].items():
        for what, ms in at.items():
            found[f"{what.removesuffix('_ms')} at {context}"] = before["at"][context][what] / ms - 1
    return found


def table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: milliseconds and GiB, predicted / measured."""
    head = "| pair | kind | format | step, ms | cycle, ms | cycle at 8,192, ms | peak, GiB | worst time | memory |"
    lines = [head, "|" + " --- |" * 9]
    for entry in entries:
        before, after, off = entry["planned"], entry["measured"], errors(entry)
        cells = [
            f"{before['at'][context][what]:.2f} / {after['at'][context][what]:.2f}"
            for context, what in (("1024", "step_ms"), ("1024", "cycle_ms"), ("8192", "cycle_ms"))
        ]
        cells.append(f"{before['peak_bytes'] / 2**30:.2f} / {after['peak_bytes'] / 2**30:.2f}")
        worst = max((value for what, value in off.items() if what != "memory"), key=abs)
        named = f"| {entry['pair']} | {entry['kind']} | {entry['format']} |"
        lines.append(f"{named} {' | '.join(cells)} | {worst:+.1%} | {off['memory']:+.1%} |")
    return lines


def predicted_today(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a record with what is planned now."""
    machine = Machine(record["card"], "cuda", MEMORY, MEMORY, "", "cuda")
    return [
        entry | {"planned": planned(entry["pair"], FORMATS[entry["format"]], machine, entry["measured"].get("chunk"))}
        for entry in record["entries"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="a record, or reports")
    parser.add_argument("--out", type=Path, help="the record to write")
    args = parser.parse_args()
    found = [json.loads(file.read_text(encoding="utf-8")) for file in args.files]
    record = found[0] if "entries" in found[0] else {"card": found[0]["card"], "entries": list(map(measured, found))}
    entries = predicted_today(record)
    print("\n".join(table(entries)))
    if args.out is not None:
        args.out.write_text(json.dumps({**record, "entries": entries}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
