"""What a cycle costs by the number of rows it verifies, measured with the very graphs that will be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from dflash_local.engine.expert_costs import MeasuredExperts
from dflash_local.engine.runner import Runner
from dflash_local.kernels.timing import span_ms
from dflash_local.models.fused.fixed_routing import FixedRouting

LENGTHS = (1, 4, 6, 8, 12, 16)  # and the trained block
REPLAYS = 7
FEWEST_AND_MOST: tuple[FixedRouting, ...] = ("same", "uniform")  # experts of a block's rows
AT = 1024  # committed tokens that attention looks back on, where the context holds as many


class Replaying(Runner, Protocol):
    """A runner whose cycles can be run by themselves. ``context``: tokens it may hold."""

    context: int
    costs: Mapping[int, float]
    experts: MeasuredExperts | None

    @property
    def num_experts(self) -> float | None:
        """Routed experts of a layer, the mean of those that are mixtures; None when none is."""

    def distinct_experts(self, rows: int) -> float | None:
        """Of the last block, which had so many rows, what ``Cycle.experts`` is; waits for the device."""

    def idle(self, ids: Sequence[int]) -> AbstractContextManager[None]:
        """Within, ``replay`` runs cycles behind these committed ids; they emit nothing and move nothing."""

    def set_anchor(self, token: int) -> None:
        """Let the next cycles begin with an id."""

    def replay(self, rows: int) -> None:
        """One greedy cycle of so many rows, recorded or replayed; 1 is the plain step."""

    def routed(self, rows: int, routing: FixedRouting) -> AbstractContextManager[None]:
        """Within, ``replay`` runs cycles of so many rows whose experts are drawn."""


@torch.inference_mode()
def measure_costs(runner: Replaying, block: int, progress: Callable[[float], None] = lambda _part: None) -> None:
    """Fill ``runner.costs``: medians in milliseconds, at about a thousand committed tokens; and ``runner.experts``.

    The runner must be fresh. Tokens are varied, committed ones and anchors: what a mixture of experts reads follows
    from them, and a text of one id would read as little as no text does. Rows of text take others, so it is measured
    as well what an expert costs (``engine.expert_costs``). Without CUDA nothing is measured.
    """
    if runner.device.type != "cuda" or runner.proposer is None:
        return
    lengths = sorted({length for length in LENGTHS if length < block} | {block})
    if (
        runner.exact and runner.num_experts is None
    ):  # every forward has the same rows; without a token they take no experts
        lengths = [1, block]
    length = min(AT, runner.context // 2)
    ids = varied_ids(length + REPLAYS + 2, runner.vocab_size)
    costs, distinct = {}, {}
    with runner.idle(ids[:length]):
        for index, rows in enumerate(lengths):
            progress(index / len(lengths))
            costs[rows], distinct[rows] = _measured(runner, rows, ids[length:])
        if runner.num_experts is not None:
            ms = _of_an_expert(runner, block, ids[length:])
            runner.experts = MeasuredExperts(runner.num_experts, distinct[1], distinct, ms)
    runner.costs = costs


def _measured(runner: Replaying, rows: int, anchors: Sequence[int]) -> tuple[float, float]:
    """Milliseconds of a cycle, the median; different experts of a layer that its rows took, the mean."""
    spans, counts = [], []
    for anchor in anchors:
        runner.set_anchor(anchor)
        spans.append(span_ms(partial(runner.replay, rows)))
        counts.append(runner.distinct_experts(rows) or 0.0)
    spans, counts = spans[2:], counts[2:]  # the first compiles, the second records
    return sorted(spans)[len(spans) // 2], sum(counts) / len(counts)


def _of_an_expert(runner: Replaying, rows: int, anchors: Sequence[int]) -> float:
    """Milliseconds that one more different expert in every layer costs a cycle."""
    found = []
    for routing in FEWEST_AND_MOST:
        with runner.routed(rows, routing):
            found.append(_measured(runner, rows, anchors))
    (short, few), (long, many) = found
    return max(0.0, (long - short) / (many - few)) if many > few else 0.0


def varied_ids(count: int, vocab_size: int) -> list[int]:
    """So many ids from all of the vocabulary, the same ones every time."""
    found: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return found
