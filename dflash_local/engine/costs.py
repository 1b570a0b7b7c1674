"""Describe what a cycle costs by the number of rows it verifies, measured with the very graphs or calls that will be
made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dflash_local.drafters.engines import Drafts
from dflash_local.engine.expert_costs import MeasuredExperts
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels.timing import span_ms
from dflash_local.models.fused.moe import FixedRouting
from dflash_local.request import SamplingParams

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # and the trained block
REPLAYS = 7
FEWEST_AND_MOST: tuple[FixedRouting, ...] = ("same", "uniform")  # experts of a block's rows
AT = 1024  # committed tokens that attention looks back on, where the context holds as many
CPU_AT = 64  # the same on a CPU
CPU_ROUNDS, CPU_S = 8, 1.5  # cycles of each length at most, and seconds after which no more are begun but the second
# A CPU that takes longer for a plain step is not measured: it would be felt, and such a model's weights are read from
# memory at a cost that hides that of a block's rows.
SLOWEST_STEP_S = 0.5


@torch.inference_mode()
def measure_costs(runner: FusedRunner, block: int, progress: Callable[[float], None] = lambda _part: None) -> None:
    """Fill ``runner.costs`` (medians in milliseconds, at about a thousand committed tokens), ``runner.wait_ms`` and
    ``runner.experts`` on CUDA. The runner must be fresh. Tokens are varied, as what a mixture reads follows from them;
    rows of text take others, so what an expert costs is measured as well (``engine.expert_costs``).
    """
    if runner.device.type != "cuda" or not runner.can_draft:
        return
    lengths = _lengths(block)
    if runner.exact and runner.num_experts is None and not runner.free_drafts:  # every forward has the same rows
        lengths = [1, block]
    length = min(AT, runner.context // 2)
    ids = varied_ids(length + REPLAYS + 2, runner.vocab_size)
    costs, distinct = {}, {}
    with runner.idle(ids[:length]):
        for index, rows in enumerate(lengths):
            progress(index / len(lengths))
            costs[rows], distinct[rows] = _measured(runner, rows, ids[length:])
        if runner.proposer is not None and runner.proposer.chained:
            runner.wait_ms = math.inf  # how many are made is chosen before there is any confidence
        elif runner.proposer is not None:
            runner.wait_ms = max(0.0, _waiting_ms(runner, block, ids[length:]) - costs[block])
        if runner.num_experts is not None:
            ms = _of_an_expert(runner, block, ids[length:])
            runner.experts = MeasuredExperts(runner.num_experts, distinct[1], distinct, ms)
    runner.costs = costs


@torch.inference_mode()
def measure_cpu_costs(runner: ReferenceRunner, block: int) -> None:
    """Fill ``runner.costs`` on a CPU. Of each length the fastest cycle counts: other programs only make them slower.
    The runner must be fresh.
    """
    ids, lengths = varied_ids(min(CPU_AT, runner.context // 2), runner.vocab_size), _lengths(block)
    sampler = Sampler(SamplingParams(temperature=0.0), 0, runner.vocab_size, torch.tensor(ids))
    proposer = runner.proposer
    if runner.free_drafts:
        runner.proposer = _Zeros()
    runner.begin(sampler, frozenset(), 1, True)
    for _ in runner.prefill(ids, 0):
        pass
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    until = time.perf_counter() + CPU_S
    for done, rows in enumerate([1, *lengths * CPU_ROUNDS]):  # the first builds oneDNN's kernels besides
        begun = time.perf_counter()
        if done > 1 and (min(seconds[1]) > SLOWEST_STEP_S or (begun > until and done > 2 * len(lengths))):
            break
        runner.set_block(rows)
        runner.launch()
        seconds[rows].append(time.perf_counter() - begun)
    if len(seconds[lengths[-1]]) > 1:
        runner.costs = {length: 1e3 * min(spent) for length, spent in seconds.items()}
    runner.restart(0, None)
    runner.collect()
    runner.proposer = proposer


class _Zeros:
    """Drafts as many ids as are asked for, where a kind would find none in varied ids."""

    length = 0

    def extend(self, taps: torch.Tensor, start: int) -> None:
        """Keep nothing."""

    def truncate(self, length: int) -> None:
        """Keep nothing."""

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        return Drafts(torch.zeros(count, dtype=torch.long), torch.zeros(count))


def _lengths(block: int) -> list[int]:
    return sorted({length for length in LENGTHS if length < block} | {block})


def _measured(runner: FusedRunner, rows: int, anchors: Sequence[int]) -> tuple[float, float]:
    """Return milliseconds of a cycle, the median; different experts of a layer that its rows took, the mean."""
    spans, counts = [], []
    for anchor in anchors:
        runner.set_anchor(anchor)
        spans.append(span_ms(partial(runner.replay, rows)))
        counts.append(runner.distinct_experts(rows) or 0.0)
    spans, counts = spans[2:], counts[2:]  # the first compiles, the second records
    return sorted(spans)[len(spans) // 2], sum(counts) / len(counts)


def _waiting_ms(runner: FusedRunner, rows: int, anchors: Sequence[int]) -> float:
    """Return milliseconds from one wait for a cycle's drafts to the next."""
    times: list[float] = []

    def note(_confidences: Sequence[float]) -> int:
        times.append(time.perf_counter())
        return rows

    for anchor in anchors:
        runner.set_anchor(anchor)
        runner.replay(rows, note)
    return 1e3 * (times[-1] - times[2]) / (len(times) - 3)  # the first cycle compiles, the second records


def _of_an_expert(runner: FusedRunner, rows: int, anchors: Sequence[int]) -> float:
    """Count milliseconds that one more different expert in every layer costs a cycle."""
    found = []
    for routing in FEWEST_AND_MOST:
        with runner.routed(rows, routing):
            found.append(_measured(runner, rows, anchors))
    (short, few), (long, many) = found
    return max(0.0, (long - short) / (many - few)) if many > few else 0.0


def varied_ids(count: int, vocab_size: int) -> list[int]:
    found: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return found
