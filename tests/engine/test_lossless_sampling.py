"""L2: the real loop samples exactly p, by chi-square on a target whose p is known.

The target is a table: the next token depends on the last one only. Counts are stratified by the slot
within the cycle, because a window that never reaches the bonus slot cannot see a bug there. The loops
with planted bugs must be caught by the same test: that is what gives it its power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import pytest
import torch

from dflash_local.drafters.dflash2.layout import SelectorConfig
from dflash_local.drafters.dflash2.reference import CandidateSelector
from dflash_local.drafters.engines import Drafts
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.sampling import Sampler, log_probabilities
from dflash_local.kernels.candidate_walk import Codebooks
from dflash_local.kernels.noise import gumbel
from dflash_local.models.transformers_target import Forward
from dflash_local.request import SamplingParams

V, BLOCK, LENGTH = 8, 4, 256
TOKENS = 60_000  # every planted bug is caught with as many
GRID_TOKENS = 150_000
LEVEL = 1e-6
CPU = torch.device("cpu")


class TableTarget:
    """Logits of the next token are a row of a table; nothing is cached."""

    is_recurrent, device, dtype, vocab_size, prefill_chunk = False, CPU, torch.float32, V, 1024

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 2
        self.length = 0

    def prefill(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        self.length += len(ids)
        return self.verify(ids, with_taps)

    def verify(self, ids: torch.Tensor, with_taps: bool) -> Forward:
        rows = self.table[ids]
        return Forward(rows, rows if with_taps else None)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def commit(self, rows: int) -> None:
        self.length += rows

    def clear(self) -> None:
        self.length = 0


class TableDrafter:
    """Walks its own table with the shared noise; sharpness 0 is uniform, greedy ignores the noise."""

    def __init__(self, table: torch.Tensor, greedy: bool = False) -> None:
        self.table, self.greedy, self.length = table, greedy, 0

    def extend(self, taps: torch.Tensor, start: int) -> None:
        self.length = start + len(taps)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def hold(self) -> int:
        return self.length

    def put(self, held: int) -> None:
        self.length = held

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        if noise is None or self.greedy:
            noise = torch.zeros(count, V)
        anchor = ids[-1]
        best = (self.table / sampler.params.temperature + noise[:count, None]).argmax(-1).tolist()
        drafts = []
        for after in best:
            anchor = after[anchor]
            drafts.append(anchor)
        return Drafts(torch.tensor(drafts, dtype=torch.long), torch.zeros(count))


class SelectorDrafter(TableDrafter):
    """A DFlash 2 drafter's walk: half of the ids are candidates, and the table says how well they follow."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__(table)
        codebooks = Codebooks(torch.eye(V), table.T)
        self.selector = CandidateSelector(SelectorConfig(V, V // 2, V), codebooks, torch.ones(V, 1))
        self.logits = torch.randn(BLOCK, V, generator=torch.Generator().manual_seed(3))

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        def choose(row: int, scores: torch.Tensor, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return sampler.draft(scores, None if noise is None else noise[row : row + 1, candidates])

        rows = torch.ones(count, 1)
        return Drafts(*self.selector.walk(rows, self.logits[:count], torch.tensor(ids[-1:]), choose))


class TabledSampler(Sampler):
    """The real sampler with its noise drawn in one call per sequence: the same values, see test_noise."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        super().__init__(params, seed, V, torch.tensor([0]))
        self.drawn = gumbel(seed, 0, LENGTH + 2 * BLOCK, V, CPU)

    def noise(self, first: int, rows: int) -> torch.Tensor:
        return self.drawn[first : first + rows]


class NoiseBySlot(TabledSampler):
    """Planted: noise keyed by the slot in the block instead of the position."""

    def noise(self, first: int, rows: int) -> torch.Tensor:
        return self.drawn[:rows]


class NoiseTwice(TabledSampler):
    """Planted: positions 2t and 2t+1 share their noise."""

    def noise(self, first: int, rows: int) -> torch.Tensor:
        return self.drawn[torch.arange(first, first + rows) // 2]


class OffByOne(TabledSampler):
    """Planted: verify reads the logits of the row before."""

    def choose(self, logits: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        return super().choose(torch.cat((logits[:1], logits[:-1])), drafts, noise)


class LastSlotOffByOne(TabledSampler):
    """Planted: the same, in the last row alone."""

    def choose(self, logits: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        if len(logits) > 1:
            logits = torch.cat((logits[:-1], logits[-2:-1]))
        return super().choose(logits, drafts, noise)


class WrongTemperature(TabledSampler):
    """Planted: verify at 0.9 of the temperature."""

    def choose(self, logits: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        return super().choose(logits / 0.9, drafts, noise)


class BonusFromDrafter(TabledSampler):
    """Planted: at the first mismatch the draft is emitted instead of the target's token."""

    def choose(self, logits: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        chosen = super().choose(logits, drafts, noise)
        wrong = (chosen[:-1] != drafts).nonzero()
        if len(wrong):
            chosen[wrong[0]] = drafts[wrong[0]]
        return chosen


PLANTED = (NoiseBySlot, NoiseTwice, OffByOne, LastSlotOffByOne, WrongTemperature, BonusFromDrafter)


def drafter_of(kind: str, target: TableTarget) -> TableDrafter:
    near = target.table + 0.7 * torch.randn(V, V, generator=torch.Generator().manual_seed(99))
    if kind == "selector":
        return SelectorDrafter(near)
    tables = {"near": near, "uniform": torch.zeros(V, V), "opposite": -target.table, "greedy": near}
    return TableDrafter(tables[kind], greedy=kind == "greedy")


def records_of(
    target: TableTarget, proposer: TableDrafter, samplers: Iterator[Sampler]
) -> Iterator[tuple[int, int, int]]:
    """Slot within the cycle, token before and token of what the loop emits, text after text."""
    for number, sampler in enumerate(samplers):
        target.clear()
        proposer.truncate(0)
        runner = ReferenceRunner(target, proposer, context=10_000)  # type: ignore[arg-type]
        runner.begin(sampler, frozenset(), BLOCK, True)
        for _ in runner.prefill([number % V], 0):
            pass
        while len(runner.ids) < LENGTH:
            before = runner.ids[-1]
            runner.launch()
            for cycle in runner.collect():
                for slot, token in enumerate(cycle.ids):
                    yield slot, before, token
                    before = token


def smallest_p_values(
    params: SamplingParams,
    drafter: str,
    sampler: Callable[[SamplingParams, int], Sampler],
    first_seed: int,
    *tokens: int,
) -> Iterator[float]:
    """Run the loop until so many tokens are counted; the smallest per-slot p-value times the number of slots.

    Args:
        tokens: counts at which the loop is looked at, from the least to the most.
    """
    target = TableTarget(seed=5)
    records = records_of(target, drafter_of(drafter, target), (sampler(params, seed) for seed in count(first_seed + 1)))
    counts = torch.zeros(BLOCK, V, V, dtype=torch.float64)
    p = log_probabilities(target.table, params).exp().double()
    done = 0
    for until in tokens:
        with torch.inference_mode():  # as sessions do
            index = torch.tensor(list(islice(records, until - done)))
        done = until
        counts.index_put_(tuple(index.t()), torch.ones(len(index), dtype=torch.float64), accumulate=True)
        tested = [chi_square(counts[slot], p) for slot in range(BLOCK) if counts[slot].sum() > 1000]
        yield min(tested) * len(tested)


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """p-value of Pearson's test of counts [previous, next] against p; cells under 5 expected are pooled."""
    assert counts[p == 0].sum() == 0, "a filtered token was emitted"
    statistic, freedom = 0.0, 0
    for seen, row in zip(counts, p, strict=True):
        expected = row * seen.sum()
        big = expected >= 5
        cells = [(seen[big], expected[big])]
        if expected[~big].sum() > 0:
            cells.append((seen[~big].sum().view(1), expected[~big].sum().view(1)))
        o, e = torch.cat([c[0] for c in cells]), torch.cat([c[1] for c in cells])
        if len(e) < 2:
            continue
        statistic += float(((o - e) ** 2 / e.clamp(min=1e-9)).sum())
        freedom += len(e) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


# Accepts and rejects in every slot. With filters in the long tests: they act on the target's rows alone, before what is
# tested here, and tests/engine/test_sampling.py holds them.
CELLS = [(SamplingParams(temperature=1.0), "near")]
ALL_CELLS = [
    *CELLS,
    (SamplingParams(temperature=1.0, top_k=4, top_p=0.9), "near"),
    (SamplingParams(temperature=1.7, top_p=0.7), "greedy"),
    *(
        (replace(filters, temperature=t), drafter)
        for t in (0.3, 1.0, 1.7)
        for filters in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.8), SamplingParams(min_p=0.1))
        for drafter in ("near", "uniform", "opposite", "greedy", "selector")
    ),
]


@pytest.mark.parametrize(("params", "drafter"), CELLS, ids=lambda x: str(x)[:60])
def test_l2_the_loop_samples_exactly_p(params: SamplingParams, drafter: str) -> None:
    assert min(smallest_p_values(params, drafter, TabledSampler, 10**6, TOKENS)) > LEVEL


def test_l2_a_selectors_walk_samples_exactly_p() -> None:
    params = SamplingParams(temperature=1.0)
    assert min(smallest_p_values(params, "selector", TabledSampler, 10**6, TOKENS // 4)) > LEVEL


@pytest.mark.parametrize("planted", PLANTED)
def test_l2_planted_bugs_are_caught(planted: type[TabledSampler]) -> None:
    drafter = "greedy" if planted is BonusFromDrafter else "near"
    params = SamplingParams(temperature=1.0)
    # Most are caught long before the whole count; what is caught with less is caught.
    assert any(value < LEVEL for value in smallest_p_values(params, drafter, planted, 10**6, 15_000, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(("params", "drafter"), list(dict.fromkeys(ALL_CELLS)), ids=lambda x: str(x)[:90])
def test_l2_full_grid_with_fresh_seeds(params: SamplingParams, drafter: str) -> None:
    seed = int(torch.seed() % 2**40)
    assert min(smallest_p_values(params, drafter, TabledSampler, seed, GRID_TOKENS)) > LEVEL, f"first seed {seed}"
