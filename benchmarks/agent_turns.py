"""What do a coding agent's turns cost on a GPU? Random weights of true shapes.

    PYTHONPATH=. python benchmarks/agent_turns.py qwen3.5-9b --stored int4-g128 > FILE.json

*trace*: 100 turns whose context grows to 100,000 tokens, drafted and plain, milliseconds a turn without its prompt.
Which drafts are right is planted as in ``planted_regimes``: half of the turns are edits (200 tokens that copy the text,
then 200 of new code, by turns), a quarter calls of tools, a quarter prose. The mix is fixed; one scheduler goes on
through all turns. Text, tokenizer and endpoint take no part.

*places*: two conversations of 24,000 tokens on one session, and a short request: seconds to the first token of a turn
whose conversation is on the device, in host memory or in a file that the machine's cache of files has not, and whether
each writes what it writes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from benchmarks.planted_regimes import REGIMES, Fixed, PlantedCopies, Replies, cycles_of, ids_of
from benchmarks.random_checkpoint import named_pair
from dflash_local.bench import random_pair
from dflash_local.bench.provenance import machine, versions
from dflash_local.config.quantizers import USUAL
from dflash_local.engine.costs import measure_costs, record_cycles
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.scheduler import Scheduler
from dflash_local.engine.session import Session
from dflash_local.events import Started, Step
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.models.fused.moe import fixed_routing
from dflash_local.request import Limits, Request, SamplingParams
from dflash_local.store.sequence_files import SequenceFiles

TURNS, CONTEXT = 100, 100_000
LONG = 200  # tokens of a reply; a shorter one may lose more


class Kind(NamedTuple):
    """Turns of a kind: tokens of a reply, the regime of its drafts, and how it copies (``PlantedCopies``)."""

    said: int
    regime: str
    copies: str


EDIT, CALL, PROSE = Kind(400, "code", "agent"), Kind(80, "code, sure or not", "chat"), Kind(200, "chat", "chat")
MIX = {"edit": EDIT, "call": CALL, "also an edit": EDIT, "prose": PROSE}
PLACED, ADDED, SAID = 24_000, 200, 32  # tokens of a conversation's first prompt, of what a turn adds, of a reply


class Trace(Replies):
    """The turns of one conversation, on one runner."""

    def run(self, drafted: bool) -> list[dict[str, Any]]:
        """Time every turn; ``drafted``: by the scheduler, else by the plain step."""
        runner, found = self.runner, list[dict[str, Any]]()
        index = PlantedCopies("chat", runner.vocab_size)
        scheduler = Scheduler(runner, max(runner.costs), index) if drafted else Fixed(runner, 1)
        runner.restart(0, None)
        names, length = list(MIX), 0
        for turn in range(TURNS):
            name = names[turn % len(names)]
            index.kind = MIX[name].copies
            length = CONTEXT * (turn + 1) // TURNS - MIX[name].said
            if isinstance(scheduler, Scheduler):
                scheduler.begin("final")
            ms = self._turn(length, MIX[name], scheduler, turn)
            found.append({"kind": name, "context": length, "said": MIX[name].said, "ms": ms})
        return found

    def _turn(self, length: int, kind: Kind, scheduler: Scheduler | Fixed, turn: int) -> float:
        runner, ids = self.runner, ids_of(self.runner, length)
        cycles = list(cycles_of(REGIMES[kind.regime], max(runner.costs) - 1, EDIT.said, turn))
        runner.restart(len(runner.committed), None)
        sampler = Sampler(SamplingParams(temperature=0.0), 0, runner.vocab_size, torch.tensor(ids[:1], device="cuda"))
        runner.begin(sampler, frozenset(), runner.target.rows, isinstance(scheduler, Scheduler))
        runner.end_at(length + kind.said, exactly=False)
        for _ in runner.prefill(ids, 0):
            pass
        for drafts in self._planted:
            drafts.plant(cycles)
        torch.cuda.synchronize()
        tokens, began = 1, time.perf_counter()
        while tokens < kind.said:
            scheduler.launch()
            for done in runner.collect():
                tokens += len(done.ids)
                scheduler.add(done)
        ms = 1e3 * (time.perf_counter() - began)
        runner.rewind(length + kind.said)
        return ms


def trace_figures(replies: Trace) -> dict[str, Any]:
    record_cycles(replies.runner)
    drafted, plain = replies.run(drafted=True), replies.run(drafted=False)
    ratios = [(each["said"] >= LONG, each["ms"] / other["ms"]) for each, other in zip(drafted, plain, strict=True)]
    whole = sum(each["ms"] for each in drafted) / sum(each["ms"] for each in plain)
    worst = {name: max(ratio for long, ratio in ratios if long == wanted) for name, wanted in
             (("long", True), ("short", False))}  # fmt: skip
    turns = [{**each, "plain_ms": other["ms"]} for each, other in zip(drafted, plain, strict=True)]
    return {"over_plain": whole, "worst_over_plain": worst, "turns": turns}


class Placed:
    """A conversation of ids that follow from its number."""

    def __init__(self, session: Session, number: int) -> None:
        self._session, self._draw = session, Random(number)
        self.ids: list[int] = []

    def turn(self, new: int) -> tuple[dict[str, float], list[int]]:
        """Seconds to the first token, tokens that were not run again; the reply."""
        self.ids += [self._draw.randrange(1000, 4000) for _ in range(new)]
        torch.cuda.synchronize()
        began, first, reused, said = time.perf_counter(), 0.0, 0, list[int]()
        for event in self._session.generate(Request(prompt_ids=tuple(self.ids), limits=Limits(SAID))):
            if isinstance(event, Started):
                reused = event.reused_tokens
            elif isinstance(event, Step):
                first = first or time.perf_counter() - began
                said += event.token_ids
        self.ids += said
        return {"first_token_s": first, "prompt_tokens": len(self.ids) - len(said), "reused_tokens": reused}, said


def place_figures(session: Session) -> dict[str, Any]:
    alone: list[list[int]] = []
    chat = Placed(session, 1)
    for new in (PLACED, *[ADDED] * 4):  # compiles and records, too
        alone.append(chat.turn(new)[1])
    session.reset()
    found, said = dict[str, Any](), list[Sequence[int]]()
    one, two = Placed(session, 1), Placed(session, 2)
    order = (("cold", one, PLACED), ("on the device", one, ADDED), ("cold, another goes to the host", two, PLACED),
             ("from the host", one, ADDED), ("a short request", Placed(session, 3), 60),
             ("from the host, behind a short request", one, ADDED))  # fmt: skip
    for name, each, new in order:
        found[name], reply = each.turn(new)
        said += [reply] if each is one else []
    with tempfile.TemporaryDirectory() as folder:
        session.keep_on_disk(SequenceFiles(Path(folder), "places", 64 * 2**30))
        session.conversations.save()
        session.reset()
        stored = [path for path in Path(folder).rglob("*") if path.is_file()]
        for path in stored:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found["from the disk"], reply = one.turn(ADDED)
        found["from the disk"]["gib"] = sum(path.stat().st_size for path in stored) / len(stored) / 2**30
        session.keep_on_disk(None)
    return {"turns": found, "as_alone": [*said, reply] == alone}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a name of the registry")
    parser.add_argument("--stored", choices=sorted(USUAL), help="the target's format; bfloat16 without")
    parser.add_argument("--only", choices=("trace", "places"))
    args = parser.parse_args()
    pair = named_pair(args.pair, args.stored)
    load = LoadConfig(engine="fused", device="cuda", drafter_precision="8bit", context=CONTEXT + 64, cache_memory=16.0)
    record: dict[str, Any] = {"pair": [pair.target, pair.drafter], "stored": args.stored}
    runner, chosen = random_pair.build(pair, CONTEXT + 64, torch.device("cuda"), torch.bfloat16, load)
    measure_costs(runner, pair.config.block_size)
    if args.only != "trace":
        load = replace(load, drafter_precision=chosen.name)
        facts = SessionFacts(pair.target, pair.drafter, pair.config.block_size, False, load)
        record["places"] = place_figures(Session(runner, facts, None, frozenset()))
        runner.restart(0, None)
    if args.only != "places":
        record["trace"] = planted_trace(runner)
    print(json.dumps(record | {"machine": machine(), "versions": versions()}, indent=2))


def planted_trace(runner: FusedRunner) -> dict[str, Any]:
    with fixed_routing(runner.target.mixtures, runner.target.rows, "uniform"):
        return trace_figures(Trace(runner, EDIT.said))


if __name__ == "__main__":
    main()
