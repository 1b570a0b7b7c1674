"""A pair over two GPUs by layers beside the same pair on one: replies and bits compared, times by turns in one run.

    PYTHONPATH=. python benchmarks/two_cards.py qwen3.5-9b --stored int4-g128 --exact > FILE.json

Random weights of the true shape, the same numbers on both sides. Each reply is written plain on one card, and twice
with the same drafted cycles: on one card, and over two. Drafts are the drafter's, or copies of the plain reply with
some ids wrong, so that any number of them is taken. Then a plain step and a cycle on one card, over two by peer copies,
and over two with every byte through pinned host memory, as cards have it whose driver allows no peers. With
``--turns 0`` the times are left out, with ``--replies 0`` the replies.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.random_checkpoint import named_pair
from dflash_local.bench import random_pair, random_run
from dflash_local.bench.provenance import machine, versions
from dflash_local.bench.random_pair import RandomPair
from dflash_local.config.quantizers import USUAL
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels.link import Link
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused.weights import Front
from dflash_local.request import SamplingParams

CONTEXT, PROMPT, SAID, AT = 2048, 100, 24, 1024
WRONG = 0.15  # of the ids that are copied
DRAFTER = "8bit"  # chosen by measuring, it could differ between the sides, and with it the drafts
GIB = 2**30


def write(runner: FusedRunner, prompt: Sequence[int], params: SamplingParams, plain: Sequence[int] = ()) -> list[int]:
    """Write a reply, plain or, given the plain one, by cycles that the prompt's first id draws; return its ids."""
    draw, device = random.Random(prompt[0]), runner.device
    ids = torch.tensor(list(prompt), device=device)
    block, end = runner.target.rows if plain else 1, len(prompt) + SAID
    runner.restart(0, None)
    runner.begin(Sampler(params, params.seed or 0, runner.vocab_size, ids), frozenset(), block, bool(plain))
    runner.end_at(end, exactly=False)
    for _ in runner.prefill(prompt, 0):
        pass
    while len(runner.ids) < end:
        copied: list[int] = []
        if plain:
            runner.set_block(draw.randrange(2, block + 1))
            if draw.random() < 0.6:
                runner.settle()
                known = plain[len(runner.ids) : len(runner.ids) + draw.randrange(1, block)]
                copied = [draw.randrange(runner.vocab_size) if draw.random() < WRONG else each for each in known]
        runner.launch(copied=copied)
        runner.collect()
    runner.settle()
    runner.collect()
    return list(runner.ids[:end])


def replies(one: FusedRunner, two: FusedRunner, count: int) -> dict[str, int]:
    """Compare so many replies, greedy and sampled by turns."""
    found = {"replies": count, "drafted_differs": 0, "plain_differs": 0, "bits_differ": 0}
    draw = random.Random(7)
    for number in range(count):
        prompt = [number, *(draw.randrange(one.vocab_size) for _ in range(PROMPT - 1))]
        params = SamplingParams(temperature=0.0 if number % 2 else 0.8, seed=number)
        plain = write(one, prompt, params)
        drafted = [write(each, prompt, params, plain) for each in (one, two)]
        found["drafted_differs"] += drafted[0] != drafted[1]
        found["plain_differs"] += plain != drafted[1]
        found["bits_differ"] += not torch.equal(one.target.logits, two.target.logits)
    return found


def times(runner: FusedRunner, rows: Sequence[int]) -> dict[str, Any]:
    place = random_run.Place(runner.device, runner.target.dtype)
    at = random_run.at_context(runner, AT, rows, place)
    return {"step": at.step.ms, **{f"verify_{count}": at.verify[count].ms for count in rows}} | {
        f"cycle_{count}": figure.ms for count, figure in at.cycle.items()
    }


def by_turns(one: FusedRunner, two: FusedRunner, rows: Sequence[int], turns: int) -> dict[str, dict[str, float]]:
    """Medians of a step and of cycles on one card, over two by peer copies, and over two through host memory."""
    front = two.target._front
    assert front is not None
    peers, host = front._link, Link(front._link.home, front._link.away, staged=True)
    found: dict[str, list[dict[str, float]]] = {"one": [], "two": [], "two_host": []}
    for _ in range(turns):
        found["one"].append(times(one, rows))
        for name, link in (("two", peers), ("two_host", host)):
            front._link = link
            found[name].append(times(two, rows))
    front._link = peers
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def build(pair: RandomPair, load: LoadConfig, front: Front | None) -> tuple[FusedRunner, list[float]]:
    """Return a runner, and the GiB that each card holds more than before."""
    before = [torch.cuda.memory_allocated(card) for card in range(2)]
    runner, _ = random_pair.build(pair, CONTEXT, torch.device("cuda:0"), torch.bfloat16, load, front=front)
    return runner, [round((torch.cuda.memory_allocated(card) - each) / GIB, 3) for card, each in enumerate(before)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a name of the registry")
    parser.add_argument("--stored", choices=sorted(USUAL), help="the target's format; bfloat16 without")
    parser.add_argument("--front", type=int, help="layers on the second card; half of them without")
    parser.add_argument("--replies", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3, help="of measuring the times")
    parser.add_argument("--exact", action="store_true", help="strict mode")
    args = parser.parse_args()
    pair = named_pair(args.pair, args.stored)
    layers = args.front or pair.model.num_layers // 2
    load = LoadConfig(exact=args.exact, drafter_precision=DRAFTER)
    (one, held), (two, split) = (build(pair, load, front) for front in (None, Front(layers, torch.device("cuda:1"))))
    record: dict[str, Any] = {"pair": [pair.target, pair.drafter], "stored": args.stored, "exact": args.exact}
    record |= {"layers": [layers, pair.model.num_layers], "gib": {"one": held, "two": split}}
    print(json.dumps(record), file=sys.stderr, flush=True)
    if args.replies:
        record["equal"] = replies(one, two, args.replies)
        print(json.dumps(record["equal"]), file=sys.stderr, flush=True)
    if args.turns:
        record["ms"] = by_turns(one, two, (1, pair.config.block_size), args.turns)
    record |= {"machine": machine(), "versions": versions()}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
