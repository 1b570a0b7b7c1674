"""A pair on this CPU: its plain step beside transformers' forward, drafted beside plain by kind of prompt.

    PYTHONPATH=. python benchmarks/cpu_pair.py [smollm2] [--dtype float32] [--prompts 2] [--tokens 128] [--out FILE]

As ``dflash run`` does it: loaded by the main thread, answered by another one. What is compared takes turns: forwards of
transformers with all threads and ours, of which medians count, and replies, as ``dflash bench`` compares them. Greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.real_pair import HELD_OUT, kinds
from dflash_local import settings
from dflash_local.app.loading import open_session
from dflash_local.app.resolve import resolve
from dflash_local.bench import provenance, speed
from dflash_local.bench.prompts import Prompt, held_out
from dflash_local.bench.report import table
from dflash_local.catalog.bundled import Pair
from dflash_local.engine.cpu_threads import THREADS, end_team
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import load_target, placement
from dflash_local.models.target_facts import TargetFacts
from dflash_local.request import SamplingParams

CONTEXT = 128
ROUNDS = 15
ROWS = (1, 4, 8, 16)


def forward_ms(session: Session, model: Any) -> dict[str, dict[int, float]]:
    """Milliseconds by rows: transformers' forward over its own cache, ours, and the engine's step, which besides
    chooses a token and the number of threads.
    """
    from transformers import DynamicCache

    runner = cast(ReferenceRunner, session.runner)
    ids = torch.randint(runner.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    spent: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    cache = DynamicCache()

    def theirs(rows: int) -> None:
        model(input_ids=ids[None, :rows], past_key_values=cache)
        cache.crop(-rows)

    def ours(rows: int) -> None:
        runner.target.head(runner.target.verify(ids[:rows], True).hidden)

    def timed(name: str, rows: int, call: Callable[[], object]) -> None:
        spent[name][rows].append(1e3 * timeit.timeit(call, number=1))

    runner.begin(Sampler(SamplingParams(temperature=0.0), 0, runner.vocab_size, ids), frozenset(), 1, False)
    with torch.inference_mode():
        model(input_ids=ids[None], past_key_values=cache)
        for _ in runner.prefill(ids.tolist(), 0):
            pass
        for rows in ROWS * ROUNDS:
            torch.set_num_threads(THREADS)
            timed("transformers", rows, partial(theirs, rows))
            timed("ours", rows, partial(ours, rows))
        for _ in range(4 * ROUNDS):
            torch.set_num_threads(THREADS)
            timed("transformers, beside steps", 1, partial(theirs, 1))
            timed("step", 1, runner.launch)
    session.reset()
    return {name: {rows: statistics.median(ms) for rows, ms in found.items()} for name, found in spent.items()}


def measure(pair: Pair, dtype: str, prompts: Sequence[Prompt], tokens: int) -> tuple[dict[str, Any], list[str]]:
    """One dtype's figures, and two tables of them."""
    session = open_session(pair, LoadConfig(dtype=dtype, device="cpu", engine="reference"))
    files = Checkpoint.open(pair.target)
    model = load_target(files, TargetFacts.from_checkpoint(files), placement("cpu", dtype))
    end_team()  # as the pair's own load ends with it
    options = speed.SpeedOptions(tokens)
    with ThreadPoolExecutor(1) as service:  # as where replies are written: a thread that did not load
        forwards = service.submit(forward_ms, session, model).result()
        del model
        compared = service.submit(speed.compare, session, prompts, options).result()
    report, lines = speed.presented(pair, session.facts, compared, options)
    costs = dict(session.runner.costs)
    session.close()
    rows = [(name, *(f"{ms[rows]:.1f}" if rows in ms else "-" for rows in ROWS)) for name, ms in forwards.items()]
    head = table(("ms", *(f"{rows} rows" for rows in ROWS)), rows)
    cycles = "cycle, ms, at load: " + ", ".join(f"{rows} rows {ms:.1f}" for rows, ms in costs.items())
    return {"costs_ms": costs, "forward_ms": forwards, "kinds": report["rows"]}, [*head, cycles, "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="both if not given")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of a reply at most")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args()
    pair = resolve(args.model, None, settings.load(), lambda _event: None)
    prompts = kinds(held_out(HELD_OUT), args.prompts)
    record = {"pair": args.model, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    print(f"{args.model}, {record['threads']} threads, load {record['load']:.1f} at the start")
    record |= {"machine": provenance.machine(), "versions": provenance.versions()}
    for dtype in args.dtype or ("float32", "bfloat16"):
        record[dtype], lines = measure(pair, dtype, prompts, args.tokens)
        print("\n".join(["", dtype, *lines]))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
