"""Where the time of a plain step and of a cycle goes on one CUDA GPU, kernel by kernel, over random weights.

``PYTHONPATH=. python benchmarks/cycle_profile.py qwen3.5-9b --stored int4-g128 --rows 1 16 --out FILE.json``
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dflash_local.bench.provenance import machine, versions
from dflash_local.bench.random_pair import build, read_pair
from dflash_local.catalog import registry
from dflash_local.catalog.shapes import shape as known_shape
from dflash_local.config.quantizers import USUAL
from dflash_local.engine.fused import CycleKey, FusedRunner
from dflash_local.kernels.timing import replay_ms

REPLAYS = 10
BETWEEN_REPLAYS_US = 100  # a longer pause is none of a replay's own


def runner_of(model: str, stored: str, precision: str, room: int) -> FusedRunner:
    """Random weights of a pair of the registry."""
    row = registry.load().find(model)
    if row is None or row.target is None or row.drafter is None:
        raise SystemExit(f"{model} is no pair of the registry: dflash models lists them")
    target, drafter = known_shape(row.target.id), known_shape(row.drafter.id)
    if target is None or drafter is None:
        raise SystemExit(f"the shapes of {model} are not kept: choose another pair")
    if stored:
        target["quantization_config"] = USUAL[stored]
    pair = read_pair((row.target.id, target), (row.drafter.id, drafter), row.fingerprints)
    return build(pair, room, torch.device("cuda"), torch.bfloat16, precision)[0]


def spans(runner: FusedRunner, rows: int, context: int) -> tuple[float, list[tuple[str, float, float]]]:
    """Milliseconds of a graph's replay without a profiler, and each kernel's name, begin and end in microseconds."""
    key = CycleKey(rows, rows > 1, rows > 1, False, runner._bucket(context + 2 * runner.target.rows))

    def work() -> None:
        runner.target.start.fill_(context)
        runner.target.kept.fill_(min(6, rows))
        runner._cycle(key)

    spent = replay_ms(work, 31)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return spent, sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda one: one[1])


def table(kernels: list[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """By kernel, of one replay: launches, and in microseconds its time (``us``), what of that came after the end of all
    earlier kernels (``exposed``), and the pauses before it (``gap``). The largest exposed time comes first.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"launches": 0.0, "us": 0.0, "gap": 0.0, "exposed": 0.0})
    last = -math.inf  # the end of all earlier kernels
    for name, begin, end in kernels:
        one = found[name]
        one["launches"] += 1 / REPLAYS
        one["us"] += (end - begin) / REPLAYS
        if begin - last < BETWEEN_REPLAYS_US:
            one["gap"] += max(begin - last, 0) / REPLAYS
        one["exposed"] += max(end - max(begin, last), 0) / REPLAYS
        last = max(last, end)
    return dict(sorted(found.items(), key=lambda item: -item[1]["exposed"]))


@torch.inference_mode()
def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stored", default="", choices=["", *USUAL], help="format of the target's weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafter-precision", default="8bit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runner = runner_of(args.model, args.stored, args.drafter_precision, args.context + 4096)
    runner.progress.limit.fill_(2**31 - 1)
    report: dict[str, Any] = {"model": args.model, "stored": args.stored, "random_weights": True, "rows": {}}
    for rows in args.rows:
        spent, kernels = spans(runner, rows, args.context)
        found = table(kernels)
        report["rows"][rows] = {"ms": spent, "kernels": found}
        busy, gaps = (sum(one[what] for one in found.values()) for what in ("exposed", "gap"))
        print(f"{rows} rows: {spent:.3f} ms; kernels {busy / 1e3:.3f}, gaps {gaps / 1e3:.3f} with the profiler")
        for name, one in list(found.items())[:24]:
            print(
                f"  {one['launches']:6.1f} x {one['us'] / one['launches']:7.2f} us, exposed {one['exposed']:8.1f}, "
                f"gap {one['gap']:6.1f}  {name[:60]}"
            )
    if args.out is not None:
        report |= {"machine": machine(), "versions": versions()}
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
