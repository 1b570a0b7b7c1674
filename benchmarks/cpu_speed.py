"""Steps and cycles of the reference engine on a CPU beside what the planner predicts from its probe.

    PYTHONPATH=. python benchmarks/cpu_speed.py qwen3-4b --layers 8 --work FOLDER [--dtype bfloat16] [--out FILE.json]

Random weights of the pair's true widths, fewer layers: times are real, acceptance is not. Rounds of the probe
and of the engine take turns, and of each the fastest counts, so that other programs trouble both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_checkpoint import build
from dflash_local.app.fitting import folder_shapes
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.sampling import Sampler
from dflash_local.planner import cpu_speed, hardware
from dflash_local.planner.cpu_probe import BYTES, COLUMNS, ROWS, CpuRates
from dflash_local.planner.machine import this_machine
from dflash_local.planner.plan import plan
from dflash_local.request import SamplingParams

CONTEXT = 128
ROUNDS = {False: 24, True: 6}  # plain steps, cycles


def measure(pair: Pair, dtype: str) -> dict[str, Any]:
    """Milliseconds of the fastest step and cycle, and what the fastest rounds of the probe say of them."""
    config = LoadConfig(dtype=dtype, device="cpu", engine="reference")
    session = load(pair, config)
    runner, own = session.runner, session.runner.proposer
    weights = np.full((BYTES // 4 // COLUMNS, COLUMNS), 1e-3, dtype=np.float32)
    seconds: dict[int | str, float] = {}

    def timed(name: int | str, call: Callable[[], object]) -> None:
        begun = time.perf_counter()
        call()
        seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - begun)

    prompt = torch.randint(0, runner.target.vocab_size, (CONTEXT,)).tolist()
    sampler = Sampler(SamplingParams(), 0, runner.target.vocab_size, torch.tensor(prompt))
    for drafted, rounds in ROUNDS.items():
        session.reset()
        runner.proposer = own if drafted else None
        runner.begin(sampler, frozenset(), session.facts.block_size if drafted else 1, drafted)
        with torch.inference_mode():
            for _ in runner.prefill(prompt, 0):
                pass
            for _ in range(rounds):
                for rows in ROWS[1:] if drafted else ROWS[:1]:
                    inputs = np.ones((rows, COLUMNS), dtype=np.float32)
                    timed(rows, lambda inputs=inputs: inputs @ weights.T)  # type: ignore[misc]
                timed("cycle" if drafted else "step", runner.launch)
                runner.collect()
    rates = CpuRates("", {rows: weights.nbytes / seconds[rows] for rows in ROWS})
    known = folder_shapes(pair.name, pair.target, pair.drafter)
    assert known is not None
    where = replace(this_machine("cpu"), rates=rates)
    predicted = cpu_speed.cpu_ms(plan(known.target, known.drafter, where, config), known.target, known.drafter, CONTEXT)
    return {
        "processor": hardware.processor(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "gb_per_s": {rows: rate / 1e9 for rows, rate in rates.rates.items()},
        "measured_ms": {name: 1e3 * seconds[name] for name in ("step", "cycle")},
        "predicted_ms": predicted and dict(zip(("step", "cycle"), predicted, strict=True)),  # None of a toy
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    parser.add_argument("--tiny", action="store_true", help="toy widths, for trying the script itself")
    args = parser.parse_args(arguments)
    target = args.work / "target"
    if not target.exists():
        build(args.model, args.work, layers=args.layers, device="cpu", tiny=args.tiny)
    found = measure(Pair("pair", target, args.work / "drafter", False), args.dtype)
    record = {"pair": args.model, "layers": args.layers, "dtype": args.dtype, **found}
    print(json.dumps(record, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
