"""Costs that follow the context and the experts that a session's cycles take, and how the counts come to the host."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dflash_local.engine import costs as measuring
from dflash_local.engine import scheduler
from dflash_local.engine.costs import REPLAYS
from dflash_local.engine.cycle_costs import ContextGrowth, CycleCosts, MeasuredExperts, MeasuredGrowth
from dflash_local.engine.fused_runner import COUNTED, FusedRunner
from dflash_local.engine.session import Session
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.events import Step
from dflash_local.kernels import experts as expert_kernels
from dflash_local.models.fused import moe
from tests.engine.fused_sessions import fused_session
from tests.engine_sessions import ask, random_prompt, text_of
from tests.families import VOCAB
from tests.fused_models import PlantedBlocks, fused_target
from tests.proposers import Oracle

ROWS = (1, 4, 6, 8, 12, 16)
DRAFT, FIXED, OF_ONE = 0.5, 2.0, 0.05  # milliseconds of a draft pass, of everything else, and of one expert
K, ALL = 8, 256
TRAINED = 7  # rows of a block: no length that is measured of every target


def uniform(rows: int) -> float:
    """Different experts of rows that choose by themselves."""
    return ALL * (1 - (1 - K / ALL) ** rows)


def correlated(rows: int) -> float:
    return K * rows**0.75


def cost(rows: int, experts: float) -> float:
    return FIXED + DRAFT * (rows > 1) + OF_ONE * experts


UNIFORM = {rows: uniform(rows) for rows in ROWS}
CORRELATED = {rows: correlated(rows) for rows in ROWS}
DEAR = {rows: cost(rows, experts) for rows, experts in UNIFORM.items()}
CHEAP = {rows: cost(rows, experts) for rows, experts in CORRELATED.items()}


def measured(distinct: Mapping[int, float], ms: float = OF_ONE) -> MeasuredExperts:
    return MeasuredExperts(ALL, K, distinct, ms)


def test_what_is_not_seen_costs_what_was_measured() -> None:
    model = CycleCosts(DEAR, measured(UNIFORM))
    assert model.by_rows == DEAR
    model.add(1, 8.0)
    model.add(4, None)
    assert model.by_rows == DEAR, "one row takes the same number always"


@pytest.mark.parametrize("seen", [(4,), (8,), (16,), (4, 8), ROWS])
def test_costs_follow_the_experts_seen(seen: tuple[int, ...]) -> None:
    """Measured with rows that choose by themselves, seen with rows that choose alike; and the other way round."""
    alike = dict.fromkeys(ROWS, 9.0) | {1: 8.0}  # rows that tell nothing of what others take
    for distinct in (UNIFORM, CORRELATED, alike):
        costs = {rows: cost(rows, experts) for rows, experts in distinct.items()}
        for true, to_be in ((CORRELATED, CHEAP), (UNIFORM, DEAR)):
            model = CycleCosts(costs, measured(distinct))
            for rows in seen:
                model.add(rows, true[rows])
            found = model.by_rows
            for rows in ROWS:
                near = 1e-9 if rows in seen or rows == 1 or true is CORRELATED else 0.1
                assert found[rows] == pytest.approx(to_be[rows], rel=near), (rows, found)


LONGER = ContextGrowth(step_ms=0.001, drafted_ms=0.0015)


def test_costs_grow_with_the_context() -> None:
    model = CycleCosts(DEAR, measured(UNIFORM), LONGER)
    model.add(8, CORRELATED[8])
    before = model.by_rows
    model.look_back(2000)
    assert model.by_rows == pytest.approx({rows: ms + (3.0 if rows > 1 else 2.0) for rows, ms in before.items()})
    assert model.draft_growth_ms == pytest.approx(1.0)
    model.look_back(0)
    assert model.by_rows == before


def driven(control: VerifyLength) -> list[int]:
    """The lengths of cycles whose drafts are accepted alike, by no confidence and by drawn ones."""
    numbers, used = random.Random(2), list[int]()
    for _ in range(300):
        rows = control.next_rows()
        used += [rows, control.cut([numbers.gauss(2, 2) for _ in range(15)])]
        control.add(rows, _accepted(rows, 0.85, numbers.random()))
    return used


def test_a_controller_behind_a_long_context_chooses_as_one_that_was_measured_there() -> None:
    """What it learnt behind a short one is of use there: its rate is that of the costs."""
    there = {rows: ms + (30.0 if rows > 1 else 20.0) for rows, ms in DEAR.items()}
    control = VerifyLength(DEAR, 16, draft_ms=1.0, growth=LONGER)
    control.look_back(20_000)
    assert (
        driven(control)
        == driven(VerifyLength(there, 16, draft_ms=11.0))
        != driven(VerifyLength(DEAR, 16, draft_ms=1.0))
    )
    control.look_back(0)
    rows = control.rival()
    tokens = control.rate * control.costs[rows]
    control.look_back(20_000)
    assert control.rate * control.costs[rows] == pytest.approx(tokens)


@pytest.mark.parametrize("share", [0.8, 0.85, 0.9])
def test_rows_that_choose_alike_are_verified_in_longer_blocks(share: float) -> None:
    """Equal acceptance and equal costs at load; only the experts that cycles take differ."""
    lengths = []
    for taken, costs in ((UNIFORM, DEAR), (CORRELATED, CHEAP)):
        control, numbers = VerifyLength(DEAR, 16, measured(UNIFORM)), random.Random(1)
        used = []
        for _ in range(3000):
            rows = control.next_rows()
            rows = control.cut([0.0] * 15) if rows > 1 else 1
            used.append(rows)
            control.add(rows, _accepted(rows, share, numbers.random()), [0.0] * (rows - 1), taken[rows])
        rates = {rows: sum(share**slot for slot in range(rows)) / costs[rows] for rows in ROWS}
        reached = sum(sum(share**slot for slot in range(rows)) for rows in used) / sum(costs[rows] for rows in used)
        assert reached > 0.96 * max(rates.values())
        lengths.append(sum(used[1000:]) / 2000)
    assert lengths[1] > lengths[0] + 1


def _accepted(rows: int, share: float, number: float) -> int:
    """Drafts accepted where each is with this share: by a number in 0..1."""
    accepted, alive = 0, share
    while accepted < rows - 1 and number < alive:
        accepted, alive = accepted + 1, alive * share
    return accepted


# On the engine


def counted_session(family: str, costs: Mapping[int, float], experts: MeasuredExperts | None) -> Session:
    session = fused_session(family, Oracle(VOCAB, text_of(family, tuple(random_prompt(9)), 160), 3), 600)
    session.runner.costs, session.runner.experts = costs, experts  # type: ignore[misc]
    return session


def watch_routes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The experts that each layer's block is routed to from now on, as ``route`` says it, are counted."""
    counts: list[int] = []

    def watched(logits: torch.Tensor, options: Any, routing: Any) -> Any:
        found = expert_kernels.route(logits, options, routing)
        counts.append(int(found.experts[found.experts < options.num_experts].unique().numel()))
        return found

    monkeypatch.setattr(moe, "route", watched)
    return counts


@pytest.mark.parametrize(("family", "asked"), [("qwen3_moe", 3), ("qwen3_5_moe", None)])
def test_replies_keep_the_experts_by_rows(family: str, asked: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sampled cycles, among them the first of each number of rows; each the mean of its layers, as routed."""
    experts = MeasuredExperts(8, 2, {1: 2.0, 2: 3.0, 4: 4.5, 8: 6.0}, 0.1)
    session = counted_session(family, {1: 4.6, 2: 5.0, 4: 5.2, 8: 6.0}, experts)
    routed, blocks = watch_routes(monkeypatch), list[list[int]]()
    finish = session.runner.target.finish

    def noted(rows: int, *more: Any) -> None:
        routed.clear()
        finish(rows, *more)
        blocks.append(list(routed))

    monkeypatch.setattr(session.runner.target, "finish", noted)
    reply = ask(session, random_prompt(9), 90, block_size=asked)
    steps = [step for step in reply.find(Step) if step.rows]
    sums: dict[int, list[float]] = {}
    before, since = 0, 0
    for step, counts in zip(steps, blocks, strict=False):  # more cycles were on their way at the end
        since = since + 1 if step.rows == before else COUNTED
        assert (step.experts is not None) == (since == COUNTED), "the first of a number of rows, and one in 16"
        before, since = step.rows, since % COUNTED
        if step.experts is not None:
            assert step.experts == sum(counts) / len(counts)
            sums.setdefault(step.rows, []).append(step.experts)
    stats = reply.finished.stats
    assert stats.distinct_experts == tuple((rows, sum(seen) / len(seen)) for rows, seen in sorted(sums.items()))
    assert [rows for rows, _ in stats.distinct_experts] == [rows for rows, _ in stats.verify_rows]
    if asked is None:
        choice = session.schedulers[True].choice
        assert choice is not None and len(sums) > 1 and choice.control.costs != session.runner.costs
    session.close()


def test_a_session_reckons_with_the_context_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "NEAR", 8)
    experts = MeasuredExperts(8, 2, {1: 2.0, 2: 3.0, 4: 4.5, 8: 6.0}, 0.0)
    session = counted_session("qwen3_moe", {1: 4.6, 2: 5.0, 4: 5.2, 8: 6.0}, experts)
    session.runner.growth = MeasuredGrowth(16, *LONGER)  # type: ignore[misc]
    ask(session, random_prompt(9), 60)
    choice = session.schedulers[True].choice
    assert choice is not None
    further = choice.control.costs[8] / LONGER.drafted_ms - 6.0 / LONGER.drafted_ms
    assert 32 <= further + 16 <= len(session.runner.ids) and choice.control.costs[1] == 4.6 + further * LONGER.step_ms
    session.close()


def measured_runner(family: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[FusedRunner, int]:
    """A runner whose costs were measured as on CUDA, each cycle a millisecond longer than the last; how many."""
    target = fused_target(family, 128, TRAINED, exact=exact)
    text = text_of(family, tuple(random_prompt(9)), 60)
    runner = FusedRunner(target, PlantedBlocks(Oracle(VOCAB, text, 3), target, TRAINED), 96)  # type: ignore[arg-type]
    monkeypatch.setattr(FusedRunner, "device", torch.device("cuda"))
    spans: list[int] = []

    def span_ms(work: Any) -> float:
        monkeypatch.setattr(FusedRunner, "device", torch.device("cpu"))
        work()
        spans.append(1)
        return float(len(spans))

    monkeypatch.setattr(measuring, "span_ms", span_ms)
    measuring.measure_costs(runner, TRAINED)
    return runner, len(spans)


@pytest.mark.parametrize(("family", "exact"), [("qwen3_moe", False), ("qwen3_moe", True), ("qwen3", True)])
def test_costs_are_measured_with_their_experts(family: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode of every number of rows, too: those without a token take no experts."""
    runner, _ = measured_runner(family, exact, monkeypatch)
    assert runner.growth == MeasuredGrowth(), "a context that is hardly longer"
    if family == "qwen3":
        assert set(runner.costs) == {1, TRAINED} and runner.experts is None
        return
    found, target = runner.experts, runner.target
    assert set(runner.costs) == {1, 2, 3, 4, 6, TRAINED} and set(runner.verify_costs) == {*runner.costs, 8, 12, 16}
    assert found is not None and set(found.distinct) == set(runner.verify_costs)
    assert runner.plain is not None and runner.plain.seconds == runner.verify_costs[1] / 1e3
    assert (found.num_experts, found.top_k) == (8, 2)
    counts = [found.distinct[rows] for rows in sorted(found.distinct)]
    assert counts[0] == 2 and counts == sorted(counts) and counts[-1] > 2
    taken = target.mixtures[0].fixed_logits is None and target.distinct_of(target.rows)
    assert taken and found.ms == pytest.approx((REPLAYS + 2) / (sum(taken) / len(taken) - 2)), "of uniform and same"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
def test_growth_is_measured_at_the_end_of_the_context(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FURTHER", 16)
    places = set[int]()
    replay = FusedRunner.replay

    def noted(runner: FusedRunner, *how: Any, **more: Any) -> None:
        places.add(int(runner.target.start))
        replay(runner, *how, **more)

    monkeypatch.setattr(FusedRunner, "replay", noted)
    runner, cycles = measured_runner(family, False, monkeypatch)
    near, step_ms, drafted_ms, own_ms = runner.growth
    further = 96 - 2 * runner.target.rows - near
    assert places == {near, near + further} and int(runner.target.start) == 0
    # The last cycles are the plain step's and the drafter's longest; there is no other drafter.
    step = cycles - (REPLAYS + 2) - REPLAYS // 2 - runner.verify_costs[1]
    assert step_ms * further == step and own_ms == 0.0
    experts = 0.0 if runner.experts is None else 4 * runner.experts.ms
    assert drafted_ms * further == pytest.approx(cycles - REPLAYS // 2 - runner.costs[TRAINED], abs=experts + 1e-9)
