"""Drafters planted in the tests, from perfect to hostile, and a way to run the real runner with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.drafters.engines import Drafts
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.engine.runner import Cycle
from dflash_local.engine.sampling import Sampler
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams


class Planted:
    """A drafter without weights: keeps its length honest and proposes what a subclass says."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.length = vocab, 0

    def extend(self, taps: torch.Tensor, start: int) -> None:
        assert start == self.length, f"context written at {start}, {self.length} held"
        self.length = start + len(taps)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def hold(self) -> int:
        return self.length

    def put(self, held: int) -> None:
        self.length = held

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> Drafts:
        start = len(ids) - 1
        assert start == self.length, f"drafting at {start} from a context of {self.length}"
        drafts = [self.token(start + 1 + i) % self.vocab for i in range(count)]
        return Drafts(torch.tensor(drafts, device=sampler.device), self.confidences(count))

    def token(self, position: int) -> int:
        raise NotImplementedError

    def confidences(self, count: int) -> torch.Tensor:
        return torch.zeros(count)


class Oracle(Planted):
    """Knows the text; ``wrong_every`` n plants an error at every n-th position, 1 is never right."""

    def __init__(self, vocab: int, text: Sequence[int], wrong_every: int = 0) -> None:
        super().__init__(vocab)
        self.text, self.wrong_every = list(text), wrong_every

    def token(self, position: int) -> int:
        known = self.text[position] if position < len(self.text) else 0
        return known + 1 if self.wrong_every and position % self.wrong_every == 0 else known


class RandomDrafts(Planted):
    """Proposes noise."""

    def token(self, position: int) -> int:
        return int(torch.randint(0, self.vocab, ()).item())


class ZeroDrafts(Planted):
    """Proposes token 0 for ever."""

    def token(self, position: int) -> int:
        return 0


def decode(
    target: TransformersTarget,
    prompt: Sequence[int],
    count: int,
    proposer: Planted | None = None,
    block: int = 1,
    params: SamplingParams | None = None,
    seed: int = 1,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], list[Cycle]]:
    """Prompt and ``count`` new ids from a cold start, and the cycles that made them."""
    target.clear()
    if proposer is not None:
        proposer.truncate(0)
    runner = ReferenceRunner(target, proposer, context=100_000)
    sampler = Sampler(
        params or SamplingParams(), seed, target.vocab_size, torch.tensor(list(prompt), device=target.device)
    )
    runner.begin(sampler, stop_ids, block, proposer is not None)
    cycles: list[Cycle] = []
    with torch.inference_mode():
        for _ in runner.prefill(prompt, 0):
            pass
        while len(runner.ids) < len(prompt) + count and runner.ids[-1] not in stop_ids:
            runner.launch()
            cycles += runner.collect()
        runner.rewind(min(len(runner.ids), len(prompt) + count))
    assert target.length == len(runner.committed) == len(runner.ids) - 1
    return runner.ids, cycles
