"""What are blocks cut by their drafts' confidences worth, and copies of the text beside them? Milliseconds a token on a
GPU, random weights of true shapes.

    PYTHONPATH=. python benchmarks/planted_regimes.py qwen3.5-35b-a3b --stored int4-g128 > FILE.json

Target and drafter do all of their work; which drafts are right, and how sure of them the drafter is, is planted cycle
by cycle. The regimes: log odds of a draft around a mean that changes with the text and from draft to draft, seen
through noise; what a real pair did (``--trace``); and blocks that always accept as many, whose confidences say nothing.
Beside the controller stand the plain step, the best fixed length of those that the controller has (chosen with
hindsight), the controller without confidences (*blind*), and with those of other drafts. It begins each reply knowing
nothing (*settled*: the same without its first eight cycles), and once more behind earlier replies of the regime
(*later*), as all but the first reply of a user do. A mixture's experts are drawn.

What copies are worth is planted by position: ``copy`` is a file that is written again, ``chat`` text with a short match
at every fifth place, of which each id is right in half of the cases, ``agent`` has 200 tokens of each by turns. Beside
the scheduler stand each of its methods alone; with ``--mtp`` the target's own layer is one of them, which is surer of
prose than a drafter of blocks is.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.random_checkpoint import named_pair
from dflash_local.bench import random_pair
from dflash_local.bench.provenance import machine, versions
from dflash_local.config.quantizers import USUAL
from dflash_local.drafters.mtp.fused import MTPBlocks
from dflash_local.engine.costs import measure_costs, record_cycles
from dflash_local.engine.drafter_choice import Chosen, DrafterChoice
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.runner import Cycle
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.scheduler import Scheduler
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.kernels.choose import GREEDY, Choosing, RowChooser
from dflash_local.kernels.timing import span_ms
from dflash_local.load_config import LoadConfig
from dflash_local.models.fused.moe import fixed_routing
from dflash_local.request import SamplingParams
from dflash_local.text_index import LONGEST, Copies, TextIndex

PROMPT, CONTEXT = 8200, 16448  # all replies stay within one bucket, so that nothing is recorded while they are timed
SPREAD = 7919  # the id at a position is the position times this prime
EQUAL = (0, 1, 2, 4, 8, 12)
SETTLED = 8  # cycles behind a border in which a controller may still be learning
RUNS = 21  # of a cycle, for its cost with drawn experts


class Regime(NamedTuple):
    """Log odds of drafts: their ``mean``, how a text differs and how a draft differs from it, the noise that
    confidences have, and cycles of a text.
    """

    mean: float
    by_text: float
    by_draft: float
    noise: float
    cycles: int


REGIMES = {
    "chat": Regime(1.0, 0.8, 1.5, 1.0, 60),
    "code": Regime(2.2, 0.8, 1.5, 1.0, 60),
    "chat, short texts": Regime(1.0, 1.2, 1.5, 1.0, 15),
    "code, sure or not": Regime(2.5, 0.8, 3.0, 0.5, 60),
    "agent": Regime(1.8, 2.0, 2.0, 0.7, 15),
}
COPIED = {"copy": "code", "chat": "chat", "agent": "agent"}  # kinds of text, and the regime of the drafter's drafts
OWN_ODDS = {"copy": 0.0, "chat": 0.8, "agent": 0.3}  # that the own layer's drafts have above the drafter's
PlantedCycle = tuple[list[float], int]  # confidences; drafts that are right


def cycles_of(regime: Regime, drafts: int, count: int, seed: int = 1) -> Iterator[PlantedCycle]:
    """The texts of a seed are as hard for each drafter."""
    draw, texts, text = random.Random(seed), random.Random(f"texts {seed}"), 0.0
    for number in range(count):
        if number % regime.cycles == 0:
            text = texts.gauss(0, regime.by_text)
        told, accepted, alive = [], 0, True
        for slot in range(drafts):
            odds = regime.mean + text + draw.gauss(0, regime.by_draft) - 0.05 * slot
            told.append(odds + draw.gauss(0, regime.noise))
            alive = alive and draw.random() < 1 / (1 + math.exp(-odds))
            accepted += alive
        yield told, accepted


def equal_cycles(accepted: int, drafts: int, count: int) -> Iterator[PlantedCycle]:
    draw = random.Random(accepted)
    for _ in range(count):
        yield [draw.gauss(0, 2) for _ in range(drafts)], min(accepted, drafts)


def recorded_cycles(trace: Path, drafts: int) -> Iterator[PlantedCycle]:
    """Of blocks that are shorter, the drafts behind them are wrong, and the drafter does not trust them."""
    for told, accepted in json.loads(trace.read_text(encoding="utf-8")):
        yield [*told[:drafts], *[0.0] * (drafts - len(told))], min(accepted, drafts)


def shuffled(cycles: Sequence[PlantedCycle]) -> list[PlantedCycle]:
    told, draw = [each for confidences, _ in cycles for each in confidences], random.Random(5)
    return [([draw.choice(told) for _ in confidences], accepted) for confidences, accepted in cycles]


def ids_of(runner: FusedRunner, count: int) -> list[int]:
    return [place * SPREAD % runner.vocab_size for place in range(count)]


class Working(RowChooser):
    """Does the work of a chooser, whose ids and margins are then left alone; what is planted takes their place."""

    def __init__(self, real: RowChooser, runner: FusedRunner) -> None:
        rows, device = runner.target.rows, runner.device
        self._real, self._start, self._vocab = real, runner.target.start, runner.vocab_size
        self._unused = torch.zeros(rows, dtype=torch.int64, device=device), torch.zeros(rows, device=device)
        self._rows = torch.arange(rows, device=device)

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        rows = len(out)
        ids, told = self._unused
        self._real.choose(logits, ids[:rows], how._replace(margins=None if how.margins is None else told[:rows]))
        out.copy_((self._start.long() + 1 + self._rows[:rows]) * SPREAD % self._vocab)
        self._plant(out, how.margins)

    def _plant(self, out: torch.Tensor, margins: torch.Tensor | None) -> None:
        """Go on from ids by position."""
        raise NotImplementedError


class PlantedDrafts(Working):
    """Drafts by position but for the first that is to be wrong, with the planted confidences of the present cycle."""

    def __init__(self, real: RowChooser, runner: FusedRunner, count: int) -> None:
        super().__init__(real, runner)
        self.at = torch.zeros(1, dtype=torch.int64, device=runner.device)
        self.accepted = torch.zeros(count, dtype=torch.int64, device=runner.device)
        self.confidences = torch.zeros(count, len(self._rows) - 1, device=runner.device)

    def plant(self, cycles: Sequence[PlantedCycle]) -> None:
        told = torch.tensor([told for told, _ in cycles])
        self.confidences[:, : told.shape[1]] = told
        self.accepted.copy_(torch.tensor([accepted for _, accepted in cycles]))
        self.at.zero_()

    def cycle(self) -> torch.Tensor:
        return self.at % len(self.accepted)

    def _plant(self, out: torch.Tensor, margins: torch.Tensor | None) -> None:
        wrong = self.accepted[self.cycle()] == self._rows[: len(out)]
        out.add_(wrong).remainder_(self._vocab)
        if margins is not None:
            margins.copy_(self.confidences[self.cycle()][0, : len(margins)])


class PlantedChoice(Working):
    """The target's: ids by position. Ends a cycle."""

    def __init__(self, real: RowChooser, runner: FusedRunner, drafts: Sequence[PlantedDrafts]) -> None:
        super().__init__(real, runner)
        self._drafts = drafts

    def _plant(self, out: torch.Tensor, margins: torch.Tensor | None) -> None:
        for each in self._drafts:
            each.at.add_(1)


class PlantedCopies(TextIndex):
    """Finds what is planted for a position of a text of some kind, which is right or not."""

    def __init__(self, kind: str, vocab_size: int) -> None:
        super().__init__()
        self.kind, self._vocab = kind, vocab_size

    def find(self, ids: Sequence[int], count: int) -> Copies:
        behind, draw = len(ids), random.Random(len(ids))
        match = LONGEST
        if self.kind == "chat" or (self.kind == "agent" and behind // 200 % 2):
            match = draw.randrange(3, 7) if draw.random() < 0.2 else 0
        right = [match == LONGEST or draw.random() < 0.5 for _ in range(min(count, match))]
        found = tuple(((behind + at) * SPREAD + (not each)) % self._vocab for at, each in enumerate(right))
        return Copies(behind, found, math.log2(max(match, 1)))


class Fixed:
    """A length that never changes, in the place of a scheduler."""

    def __init__(self, runner: FusedRunner, rows: int, own: bool = False) -> None:
        self._runner, self._rows, self._own = runner, rows, own

    def begin(self, _kind: str) -> None:
        """Begin nothing."""

    def launch(self) -> None:
        self._runner.set_block(self._rows, self._own)
        self._runner.launch()

    def add(self, _cycle: Cycle) -> None:
        """Learn nothing."""


class PlantedMTP(MTPBlocks):
    """A layer whose drafts are planted."""

    selector: Any = None


class Timed(NamedTuple):
    """Milliseconds a token of a reply, and of its tokens behind the first ``SETTLED`` cycles; cycles by rows."""

    ms: float
    settled_ms: float
    lengths: Counter[int]


class Replies:
    """Replies of planted cycles, on one runner."""

    def __init__(self, runner: FusedRunner, count: int) -> None:
        assert runner.proposer is not None
        self.runner, self._count = runner, count
        chooser = runner.proposer.selector or runner._draft_chooser
        self._drafts = runner.proposer.selector = PlantedDrafts(chooser, runner, count)
        planted = [self._drafts]
        if isinstance(runner.own, MTPBlocks):
            own = PlantedDrafts(copy(runner.own), runner, count)
            runner.own.__class__, runner.own.selector = PlantedMTP, own
            planted.append(own)
        self._planted = planted
        runner._chooser = PlantedChoice(runner._chooser, runner, planted)  # type: ignore[assignment]
        runner._graphs.clear()

    def ms(
        self,
        cycles: Sequence[PlantedCycle],
        scheduler: Scheduler | Fixed,
        of_own: Sequence[PlantedCycle] = (),
    ) -> Timed:
        """``of_own``: what the target's own layer drafts."""
        runner, lengths, tokens = self.runner, Counter[int](), 0
        ids = ids_of(runner, PROMPT)
        runner.restart(0, None)
        prompt = torch.tensor(ids, device=runner.device)
        sampler = Sampler(SamplingParams(temperature=0.0), 0, runner.vocab_size, prompt)
        runner.begin(sampler, frozenset(), runner.target.rows, True)
        scheduler.begin("final")
        for _ in runner.prefill(ids, 0):
            pass
        for drafts, each in zip(self._planted, (cycles, of_own or cycles), strict=False):
            drafts.plant(each)
        torch.cuda.synchronize()
        began = settled = time.perf_counter()
        before = 0
        while lengths.total() < self._count - 3:  # those on their way read the rest
            scheduler.launch()
            for done in runner.collect():
                tokens += len(done.ids)
                lengths[done.rows] += 1
                scheduler.add(done)
                if lengths.total() == SETTLED:
                    settled, before = time.perf_counter(), tokens
        ended = time.perf_counter()
        runner.rewind(len(runner.ids))
        return Timed(1e3 * (ended - began) / tokens, 1e3 * (ended - settled) / (tokens - before), lengths)


class OwnAlone(DrafterChoice):
    """The target's own layer and the plain step, without the drafter."""

    def __init__(self, controls: Sequence[VerifyLength]) -> None:
        super().__init__(controls[1:])

    def next(self) -> Chosen:
        return super().next()._replace(drafter=1)

    def add(self, chosen: Chosen, cycle: Cycle) -> None:
        super().add(chosen._replace(drafter=0), cycle)


class CopiesAlone(Scheduler):
    """Copies and the plain step."""

    def begin(self, kind: str) -> None:
        super().begin(kind)
        self.stop_drafting()


def scheduler_of(runner: FusedRunner, copies: str = "", own: str = "", drafter: bool = True) -> Scheduler:
    """One that chooses among these methods and the plain step; ``copies``: the kind of text, or empty. ``own``: whether
    the target's own layer is ``beside`` the drafter, ``alone`` or not used.
    """
    costs, runner.own_costs = runner.own_costs, runner.own_costs if own else {}
    kind = Scheduler if drafter else CopiesAlone
    found = kind(runner, max(runner.costs), PlantedCopies(copies, runner.vocab_size))
    runner.own_costs = costs
    if own == "alone":
        found._choices = {kind: OwnAlone(choice.controls) for kind, choice in found._choices.items()}
    if not copies:
        found._copied = None
    return found


class Blind(DrafterChoice):
    """Knows no confidences: drafts are worth what their places in the block are."""

    def add(self, chosen: Chosen, cycle: Cycle) -> None:
        super().add(chosen, replace(cycle, confidences=()))


def blind_scheduler(runner: FusedRunner) -> Scheduler:
    found = scheduler_of(runner)
    found._choices = {kind: Blind(choice.controls) for kind, choice in found._choices.items()}
    return found


def compare(
    replies: Replies,
    planted: Sequence[Sequence[PlantedCycle]],
    before: Sequence[PlantedCycle],
    costs: dict[int, float],
    told: bool,
) -> Any:
    """Time the replies of one regime; ``before``: the cycles of one in front of them, from which the controller has
    learnt (*later*). ``told``: confidences say something, and the controller is timed with none or others as well.
    """
    runner, spent = replies.runner, defaultdict[str, float](float)
    emitted = {rows: sum(min(right, rows - 1) + 1 for cycles in planted for _, right in cycles) for rows in costs}
    best = max((rows for rows in costs if rows > 1), key=lambda rows: emitted[rows] / costs[rows])
    plain = replies.ms(planted[0], Fixed(runner, 1)).ms
    learnt, lengths = scheduler_of(runner), Counter[int]()
    replies.ms(before, learnt)
    for cycles in planted:
        ways: dict[str, Scheduler | Fixed] = {"fixed": Fixed(runner, best)}
        ways |= {"ours": scheduler_of(runner), "later": learnt}
        if told:
            ways |= {"blind": blind_scheduler(runner), "shuffled": scheduler_of(runner)}
        for way, scheduler in ways.items():
            timed = replies.ms(shuffled(cycles) if way == "shuffled" else cycles, scheduler)
            spent[way] += timed.ms / len(planted)
            if way == "ours":
                spent["settled"] += timed.settled_ms / len(planted)
                lengths += timed.lengths
    least = min(plain, spent["fixed"])
    found = {"plain_ms": plain, "fixed_rows": best, **{f"{way}_ms": ms for way, ms in spent.items()}}
    found |= {f"{way}_over_fixed": least / spent[way] for way in ("ours", "settled", "later")}
    found |= {"over_blind": spent["blind"] / spent["ours"]} if told else {}
    return found | {"cycles_by_rows": dict(sorted(lengths.items()))}


def compare_methods(replies: Replies, copies: str, texts: int, count: int) -> Any:
    """Time so many texts of a kind that may be copied: a reply of each method, and its next one (*later*)."""
    runner, regime, found = replies.runner, REGIMES[COPIED[copies]], defaultdict[str, float](float)
    surer = regime._replace(mean=regime.mean + OWN_ODDS[copies])
    longest, own_longest = max(runner.costs), max(runner.own_costs, default=1)
    scheduler, beside = partial(scheduler_of, runner), "beside" if runner.own_costs else ""
    methods = {"drafter": scheduler, "copies": partial(scheduler, copies, drafter=False)}
    if beside:
        methods |= {"mtp": partial(scheduler, own="alone"), "drafter_and_mtp": partial(scheduler, own=beside)}
    methods["all"] = partial(scheduler, copies, beside)
    for seed in range(1, 2 * texts, 2):
        schedulers = {name: method() for name, method in methods.items()}
        for reply, end in ((seed, "ms"), (seed + 1, "later_ms")):
            drafted = list(cycles_of(regime, longest - 1, count, reply))
            by_layer = list(cycles_of(surer, own_longest - 1, count, reply))
            for name, way in schedulers.items():
                found[f"{name}_{end}"] += replies.ms(drafted, way, by_layer).ms / texts
    found["plain_ms"] = replies.ms(drafted, Fixed(runner, 1)).ms
    for end, over in (("ms", "over"), ("later_ms", "later_over")):
        without_copies = min(
            found["plain_ms"], *(found[f"{name}_{end}"] for name in ("drafter", "mtp") if name in methods)
        )
        found[f"{over}_drafter"] = found[f"drafter_{end}"] / found[f"all_{end}"]
        found[f"{over}_best"] = min(without_copies, found[f"copies_{end}"]) / found[f"all_{end}"]
        if beside:
            found[f"{over}_best_without_copies"] = without_copies / found[f"drafter_and_mtp_{end}"]
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a name of the registry")
    parser.add_argument("--stored", choices=sorted(USUAL), help="the target's format; bfloat16 without")
    parser.add_argument("--cycles", type=int, default=500, help="of a reply, up to 600: the context holds no more")
    parser.add_argument("--replies", type=int, default=3, help="of a regime or kind of text, each with its own texts")
    parser.add_argument("--only", choices=("regimes", "methods"), help="of the two tables")
    parser.add_argument("--trace", type=Path, help="beside the regimes: JSON of [[confidences, accepted], ...]")
    parser.add_argument("--mtp", action="store_true", help="the target's own layer beside the drafter")
    args = parser.parse_args()
    pair = named_pair(args.pair, args.stored)
    load = LoadConfig(drafter_precision="8bit", mtp=args.mtp)
    runner, _ = random_pair.build(pair, CONTEXT, torch.device("cuda"), torch.bfloat16, load)
    measure_costs(runner, pair.config.block_size)
    measured, drafts, regimes, methods = dict(runner.costs), pair.config.block_size - 1, {}, {}
    replies = Replies(runner, args.cycles)
    with fixed_routing(runner.target.mixtures, runner.target.rows, "uniform"):
        with runner.idle(ids_of(runner, 1024)):
            times = {rows: sorted(span_ms(partial(runner.replay, rows)) for _ in range(RUNS)) for rows in measured}
        costs = {rows: spans[RUNS // 2] for rows, spans in times.items()}
        record_cycles(runner)
        planted = {}
        for name, regime in REGIMES.items():
            planted[name] = [list(cycles_of(regime, drafts, args.cycles, seed)) for seed in range(args.replies + 1)]
        for accepted in EQUAL:
            planted[f"always {accepted}"] = [list(equal_cycles(accepted, drafts, args.cycles))] * 2
        if args.trace is not None:
            recorded = list(recorded_cycles(args.trace, drafts))
            parts = [recorded[at : at + args.cycles] for at in range(0, len(recorded) - args.cycles + 1, args.cycles)]
            planted[args.trace.stem] = parts
        for name, (before, *several) in planted.items() if args.only != "methods" else ():
            regimes[name] = compare(replies, several, before, costs, not name.startswith("always "))
            print(name, regimes[name], file=sys.stderr, flush=True)
        for name in COPIED if args.only != "regimes" else ():
            methods[name] = compare_methods(replies, name, args.replies, args.cycles)
            print(name, methods[name], file=sys.stderr, flush=True)
    record = {"pair": [pair.target, pair.drafter], "stored": args.stored, "cycles": args.cycles, "cycle_ms": costs}
    record |= {"measured_at_load": measured, "wait_ms": runner.wait_ms, "growth": runner.growth._asdict()}
    record |= {"given_at_load": dict(runner.verify_costs), "own_at_load": dict(runner.own_costs)}
    record |= {"regimes": regimes, "methods": methods}
    print(json.dumps(record | {"machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
