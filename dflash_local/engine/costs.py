"""Describe what a cycle costs by the number of rows it verifies, measured with the very graphs or calls that will be
made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from dflash_local.engine.cycle_costs import MeasuredExperts, MeasuredGrowth
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.runner import PlainStep
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.errors import NumericsError
from dflash_local.kernels.timing import span_ms
from dflash_local.layout.part_layout import LEAST_ROWS
from dflash_local.models.fused.moe import FixedRouting
from dflash_local.request import SamplingParams

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # and the trained block
REPLAYS = 7
WAITS = 16  # cycles whose drafts are waited for, beside as many that are not
FEWEST_AND_MOST: tuple[FixedRouting, ...] = ("same", "uniform")  # experts of a block's rows
RECORDED = 3  # buckets of the target, which are all that there are outside of strict mode
AT = 1024  # committed tokens that attention looks back on, where the context holds as many
CPU_AT = 64  # the same on a CPU
CPU_ROUNDS, CPU_S = 8, 1.5  # cycles of each length at most, and seconds after which no more are begun but the second
FURTHER = 1024  # tokens at least that a context is longer behind which growth is measured
PLAIN_STEPS = 6  # of which the first is left out: it builds oneDNN's kernels besides
Found = tuple[float, float]  # milliseconds of a cycle; different experts of a layer that its rows took
AT_LOAD = "measured at load over {:,} tokens"
# A CPU that takes longer for a plain step is not measured: it would be felt, and such a model's weights are read from
# memory at a cost that hides that of a block's rows.
SLOWEST_STEP_S = 0.5


@torch.inference_mode()
def measure_costs(runner: FusedRunner, block: int, progress: Callable[[float], None] = lambda _part: None) -> None:
    """Fill ``runner.costs``, ``own_costs`` and ``verify_costs`` (medians in milliseconds, at about a thousand committed
    tokens), ``runner.plain``, ``wait_ms``, ``experts`` and ``growth`` on CUDA, where there are drafts to verify
    (``block`` over 1). The runner must be fresh. Tokens are varied, as what a mixture reads follows from them; rows of
    text take others, so what an expert costs is measured as well, and what the longest context does
    (``engine.cycle_costs``).
    """
    if runner.device.type != "cuda" or block == 1:
        return
    proposer, own, longest = runner.proposer, runner.own, runner.target.rows
    of_own = [] if own is None else _lengths(own.config.block_size)[1:]
    lengths = sorted({*_lengths(longest), block, *of_own})  # experts are counted at every length that is used
    # In strict mode of a dense target every forward has the same rows.
    same = runner.exact and runner.num_experts is None
    drafting = [] if proposer is None else [1, block] if same else _lengths(block)
    length = min(AT, runner.context // 2)
    ids = varied_ids(length + REPLAYS + 2 + longest, runner.vocab_size)
    with runner.idle(ids[:length]):
        given: dict[int, Found] = {}
        for rows in lengths:
            progress(len(given) / (2 * len(lengths)))
            given[rows] = _measured(runner, rows, ids[length:], given=True)
        drafted = {1: given[1]} if drafting else {}
        for rows in drafting[1:]:
            progress((len(lengths) + len(drafted)) / (2 * len(lengths)))
            drafted[rows] = _measured(runner, rows, ids[length:])
        costs = _milliseconds(drafted)
        owned = {} if own is None else {1: given[1]}
        for rows in of_own:
            owned[rows] = _measured(runner, rows, ids[length:], own=True)
        runner.own_costs = _milliseconds(owned)
        if proposer is not None and proposer.chained:
            runner.wait_ms = math.inf  # how many are made is chosen before there is any confidence
        elif proposer is not None:
            runner.wait_ms = _waiting_ms(runner, block, costs)
        if runner.num_experts is not None:
            distinct = {rows: count for rows, (_, count) in given.items()}
            ms = _of_an_expert(runner, longest, ids[length:])
            runner.experts = MeasuredExperts(runner.num_experts, distinct[1], distinct, ms)
        if (further := runner.context - 2 * longest - length) >= FURTHER:
            runner.target.set_length(length + further)
            runner.growth = MeasuredGrowth(length, *_growth(runner, further, ids[length:], given, drafted, owned))
    runner.costs, runner.verify_costs = costs, _milliseconds(given)
    runner.plain = PlainStep(given[1][0] / 1e3, AT_LOAD.format(length))


@torch.inference_mode()
def record_cycles(runner: FusedRunner) -> None:
    """Record all greedy cycles whose costs were measured: one that is recorded in the middle of a reply takes ten times
    as long. The runner must be fresh.
    """
    if not runner.verify_costs:
        return
    with runner.idle(varied_ids(1, runner.vocab_size)):
        for at in range(len(runner.target.buckets[:RECORDED])):
            for _ in range(2):  # the first compiles
                for rows in runner.verify_costs:
                    runner.replay(rows, given=True, at=at)
                for rows in {1, max(runner.costs)} if runner.costs else ():  # the drafts are those of all lengths
                    runner.replay(rows, at=at)
                for rows in list(runner.own_costs)[1:]:
                    runner.replay(rows, own=True, at=at)


@torch.inference_mode()
def measure_plain(runner: ReferenceRunner) -> None:
    """Fill ``runner.plain``: the fastest step, since other programs only make one slower and no speed-up is to come
    from that. No drafter's context is kept up. The runner must be fresh; a context without room is not measured.
    """
    if runner.context < CPU_AT + PLAIN_STEPS + 1:
        return
    try:
        _prefilled(runner, CPU_AT, with_drafts=False)
    except NumericsError:  # the first reply says so, and a check finds where
        runner.restart(0, None)
        return
    spans: list[float] = []
    while len(spans) < PLAIN_STEPS and (len(spans) < 2 or spans[-1] < SLOWEST_STEP_S):
        begun = time.perf_counter()
        runner.launch()
        spans.append(time.perf_counter() - begun)
    runner.restart(0, None)
    runner.collect()
    # That one was measured with the drafter's context kept up, so it is no faster.
    known = [runner.verify_costs[1] / 1e3] if 1 in runner.verify_costs else []
    runner.plain = PlainStep(min(spans[1:] + known), AT_LOAD.format(CPU_AT))


@torch.inference_mode()
def measure_cpu_costs(runner: ReferenceRunner, block: int) -> None:
    """Fill ``runner.costs`` and ``runner.verify_costs`` on a CPU. Of each length the fastest cycle counts: other
    programs only make them slower. The runner must be fresh; a context without room for two cycles of each length is
    not measured.
    """
    lengths = _lengths(max(block, LEAST_ROWS))
    ids = _prefilled(runner, min(CPU_AT, runner.context // 2), with_drafts=True)
    given: dict[int, list[float]] = {length: [] for length in lengths}
    drafted: dict[int, list[float]] = {length: [] for length in _lengths(block)[1:] if runner.proposer is not None}
    own_block = 1 if runner.own is None else runner.own.config.block_size
    owned: dict[int, list[float]] = {length: [] for length in _lengths(own_block)[1:]}
    kinds = [(rows, spent) for spent in (given, drafted, owned) for rows in spent]
    until = time.perf_counter() + CPU_S
    for done, (rows, spent) in enumerate([kinds[0], *kinds * CPU_ROUNDS]):  # the first builds oneDNN's kernels besides
        begun = time.perf_counter()
        if len(runner.committed) + lengths[-1] > runner.context:  # a cycle would be shorter than what it counts for
            break
        if done > 1 and (min(given[1]) > SLOWEST_STEP_S or (begun > until and done > 2 * len(kinds))):
            break
        runner.set_block(1 if spent is given else rows, own=spent is owned)
        runner.launch(copied=ids[: rows - 1] if spent is given else ())
        spent[rows].append(time.perf_counter() - begun)
    if len(kinds[-1][1][kinds[-1][0]]) > 1:
        runner.verify_costs = {length: 1e3 * min(spans) for length, spans in given.items()}
        runner.costs, runner.own_costs = (_with_step(runner.verify_costs[1], spans) for spans in (drafted, owned))
    runner.restart(0, None)
    runner.collect()


def _prefilled(runner: ReferenceRunner, length: int, with_drafts: bool) -> list[int]:
    """Have so many tokens committed, for cycles that follow greedily; returns them."""
    ids = varied_ids(length, runner.vocab_size)
    prompt = torch.tensor(ids, device=runner.device)
    runner.begin(Sampler(SamplingParams(temperature=0.0), 0, runner.vocab_size, prompt), frozenset(), 1, with_drafts)
    for _ in runner.prefill(ids, 0):
        pass
    return ids


def _with_step(step_ms: float, spans: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the fastest of each length in milliseconds, and the plain step; empty where there are none."""
    return {1: step_ms, **{length: 1e3 * min(each) for length, each in spans.items()}} if spans else {}


def _lengths(block: int) -> list[int]:
    return sorted({length for length in LENGTHS if length < block} | {block})


def _milliseconds(found: Mapping[int, Found]) -> dict[int, float]:
    return {rows: ms for rows, (ms, _) in found.items()}


def _growth(
    runner: FusedRunner,
    further: int,
    ids: Sequence[int],
    given: Mapping[int, Found],
    drafted: Mapping[int, Found],
    owned: Mapping[int, Found],
) -> list[float]:
    """Return what one more token costs the plain step and the cycles of either drafter, as ``MeasuredGrowth`` holds it,
    of a runner whose context is so much longer by now.

    Args:
        given, drafted, owned: what was measured before of cycles whose drafts are given, and of either drafter's.
    """
    bucket = runner.target.buckets.index(runner.target.bucket(runner.context))

    def grown(near: Mapping[int, Found], rows: int, **how: bool) -> float:
        """Leave out that its rows may take other experts there."""
        (ms, distinct), (ms_near, distinct_near) = _measured(runner, rows, ids, bucket=bucket, **how), near[rows]
        of_experts = 0.0 if runner.experts is None else runner.experts.ms * (distinct - distinct_near)
        return max(0.0, ms - ms_near - of_experts) / further

    found = [grown(given, 1, given=True), grown(drafted, max(drafted)) if drafted else 0.0]
    return [*found, grown(owned, max(owned), own=True) if owned else 0.0]


def _measured(
    runner: FusedRunner, rows: int, ids: Sequence[int], given: bool = False, own: bool = False, bucket: int = 0
) -> Found:
    """Return milliseconds of a cycle, the median; different experts of a layer that its rows took, the mean. ``given``,
    ``own``: see ``FusedRunner.replay``, whose ``at`` is the ``bucket``.
    """
    spans, counts = [], []
    for at in range(REPLAYS + 2):
        runner.set_tokens(ids[at : at + rows])
        spans.append(span_ms(partial(runner.replay, rows, given=given, own=own, at=bucket)))
        counts.append(runner.distinct_experts(rows) or 0.0)
    spans, counts = spans[2:], counts[2:]  # the first compiles, the second records
    return sorted(spans)[len(spans) // 2], sum(counts) / len(counts)


def _waiting_ms(runner: FusedRunner, block: int, costs: Mapping[int, float]) -> float:
    """Return milliseconds that a cycle takes longer where its length is chosen from its confidences: of cycles that are
    launched one behind the other, as in a reply.
    """
    control, spent = VerifyLength(costs, block), list[float]()

    def judged(confidences: Sequence[float]) -> int:
        control.cut(confidences)
        return block

    def now() -> float:
        int(runner.progress.done)  # behind all that is launched
        return time.perf_counter()

    for cut in (None, judged):
        runner.replay(block, cut)
        begun = now()
        for _ in range(WAITS):
            runner.replay(block, cut)
        spent.append(now() - begun)
    return max(0.0, 1e3 * (spent[1] - spent[0]) / WAITS)


def _of_an_expert(runner: FusedRunner, rows: int, ids: Sequence[int]) -> float:
    """Count milliseconds that one more different expert in every layer costs a cycle."""
    found = []
    for routing in FEWEST_AND_MOST:
        with runner.routed(rows, routing):
            found.append(_measured(runner, rows, ids, given=True))
    (short, few), (long, many) = found
    return max(0.0, (long - short) / (many - few)) if many > few else 0.0


def varied_ids(count: int, vocab_size: int) -> list[int]:
    found: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return found
