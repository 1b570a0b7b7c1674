"""What plans predict beside what this card measures: step, cycle and memory of twelve combinations, random weights.

    PYTHONPATH=. python benchmarks/predicted_speed.py --out FILE.json [--only NAME] [--until SECONDS]
    PYTHONPATH=. python benchmarks/predicted_speed.py --record FILE.json

Dense, hybrid and mixtures of experts, in bf16, fp8 and int4: ``dflash bench NAME --weights random[:FORMAT]``, and what
``dflash plan`` says before. The first pair is the first work of the card: begin on one that has been idle. The probe by
which predictions are scaled is taken of this very card. ``--record`` needs no GPU: it shows what is predicted today of
the card and the combinations of a record, by the probe that comes with the program, beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.speed_table import STORED as FORMATS
from benchmarks.speed_table import stored_as
from dflash_local.app.fitting import shapes
from dflash_local.app.random_bench import RandomOptions, bench_random
from dflash_local.app.resolve import of_row
from dflash_local.bench.random_run import SLACK
from dflash_local.catalog import registry
from dflash_local.cli.console import Console
from dflash_local.errors import DFlashError
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import plan
from dflash_local.planner.speed import predict
from dflash_local.settings import Settings
from dflash_local.settings import load as load_settings

KINDS = {
    "qwen3-8b": "dense",
    "qwen3.5-9b": "hybrid",
    "qwen3-coder-30b-a3b": "experts",
    "qwen3.5-35b-a3b": "hybrid, experts",
}
CONTEXTS = (1024, 8192)
PREFILL = 8192
LOAD = LoadConfig(drafter_precision="8bit")  # what auto takes on every card measured so far


def planned(name: str, stored: str | None, machine: Machine) -> dict[str, Any]:
    """The plan's peak and times of a pair on a card.

    Args:
        stored: of ``FORMATS``. machine: with all of its memory free.
    """
    row = registry.load().find(name)
    known = None if row is None else shapes(of_row(row), None)
    if known is None or known.drafter is None:
        raise SystemExit(f"no shape of {name}")
    target = stored_as(known.target, stored)
    config = replace(LOAD, context=max(*CONTEXTS, PREFILL) + SLACK, offload="none")
    found = plan(target, known.drafter, machine, config)
    prediction = predict(found, target, known.drafter)
    if prediction is None:
        raise SystemExit(f"{name}: nothing is predicted of {found.engine} in {found.dtype} on {machine.name}")
    times = {str(each.context): {"step_ms": each.step_ms, "cycle_ms": each.cycle_ms} for each in prediction.times}
    return {"basis": prediction.basis, "peak_bytes": found.ledger.peak, "at": times}


def measured(name: str, stored: str | None, user: Settings, console: Console) -> dict[str, Any]:
    """The report of ``dflash bench --weights random``, what is compared of it."""
    options = RandomOptions(LOAD, contexts=CONTEXTS, prefill=PREFILL, stored=stored)
    report, lines = bench_random(name, options, user, console.notify)
    console.lines(lines)
    block, found = str(report["block_size"]), report["measured"]
    times = {
        str(at["context"]): {"step_ms": at["ar_step"]["ms"], "cycle_ms": at["cycle"][block]["ms"]} for at in found["at"]
    }
    return {
        "card": report["card"],
        "versions": report["versions"],
        "block_size": report["block_size"],
        "peak_bytes": found["peak_bytes"],
        "notices": found["notices"],
        "at": times,
    }


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
    """The entries of a record with what is planned now, for a card of which only the name is known."""
    memory = 141 * 2**30
    machine = Machine(record["card"], "cuda", memory, memory, "", "cuda")
    return [
        entry | {"planned": planned(entry["pair"], FORMATS[entry["format"]], machine)} for entry in record["entries"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure them and print the table; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=KINDS, help="one pair")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="SECONDS", help="begin nothing after them")
    parser.add_argument("--record", type=Path, help="measure nothing")
    args = parser.parse_args(arguments)
    if args.record is not None:
        print("\n".join(table(predicted_today(json.loads(args.record.read_text(encoding="utf-8"))))))
        return 0
    import torch

    from dflash_local.kernels.card_probe import measure

    began, failed = time.monotonic(), 0
    entries: list[dict[str, Any]] = []
    user, console = load_settings(), Console({})
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory
    probe = measure(torch.device("cuda", 0))
    print(probe, flush=True)
    machine = Machine(properties.name, "cuda", memory, memory, "", "cuda", probe=probe)
    for name, kind in KINDS.items():
        for form, stored in FORMATS.items():
            if args.only not in (None, name) or time.monotonic() - began > args.until:
                continue
            started = time.monotonic()
            try:
                entry: dict[str, Any] = {
                    "pair": name,
                    "kind": kind,
                    "format": form,
                    "planned": planned(name, stored, machine),
                }
                entry["measured"] = measured(name, stored, user, console)
            except DFlashError as error:
                print(f"{name} {form}: {error.message}", flush=True)
                failed += 1
                continue
            entry["errors"], entry["seconds"] = errors(entry), time.monotonic() - started
            entries.append(entry)
            print(f"{name} {form}: {entry['seconds']:.0f} s", flush=True)
            if args.out is not None:
                args.out.write_text(
                    json.dumps({"card": machine.name, "probe": asdict(probe), "entries": entries}, indent=1) + "\n"
                )
    print("\n".join(table(entries)))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
