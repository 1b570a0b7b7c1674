"""What a block drafts: its context, its slots, its temperature, its noise.

Wrong drafts change no text, so the tests of the text cannot see them: here they are compared with a cold start, and
with what the target itself will choose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import Pair
from dflash_local.drafters.dflash.reference import DFlashProposer
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.session import Session
from dflash_local.events import Started, Step
from dflash_local.kernels.noise import gumbel
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams
from tests.engine_sessions import BLOCK, ask, random_prompt
from tests.families import VOCAB, random_model
from tests.fused_models import TAPS, PlantedBlocks
from tests.proposers import Planted

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = random_prompt(9)
CASES = ((0.3, 7), (1.0, 2**63 + 5), (0.0, 3), (1.7, 9), (0.3, 8))  # temperature, seed
BLOCKS = (BLOCK, 3, BLOCK, 5, 2)  # of each case
NEW = 30


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("name", ["qwen3-v2-swa-b16", "qwen35-v2-swa-b8"])
def test_each_turn_drafts_as_from_a_cold_start(name: str, engine: str) -> None:
    """Whatever was rejected, cancelled, said without drafts or taken back before, the context is that of the text."""
    pair = Pair(name, GOLDEN / name / "target", GOLDEN / name / "drafter", bundled=False)
    session, fresh = (load(pair, LoadConfig(dtype="float32", device="cpu", engine=engine)) for _ in range(2))
    talk, accepted, reused = random_prompt(19, seed=3), list[int](), list[int]()

    def turn(more: list[int], new: int, **fields: Any) -> None:
        fields.setdefault("block_size", session.facts.block_size)
        talk.extend(more)
        reply = ask(session, talk, new, **fields)
        fresh.reset()
        cold = ask(fresh, talk, new, **{**fields, "cancelled": lambda: False})
        count = len(reply.finished.stats.acceptance_lengths)
        assert reply.ids == cold.ids[: len(reply.ids)]
        assert reply.finished.stats.acceptance_lengths == cold.finished.stats.acceptance_lengths[:count]
        accepted.extend(reply.finished.stats.acceptance_lengths)
        reused.extend(started.reused_tokens for started in reply.find(Started))
        talk.extend(reply.ids)

    turn([], 21)  # ends inside a block
    turn([1, 2, 3], 20, block_size=3)
    asked = iter((False, False, False, True))
    turn([4], 40, cancelled=lambda: next(asked))
    turn([6, 7], 9, mode="ar", block_size=None)  # whose taps nobody takes
    turn([8], 24)
    del talk[14:]  # back behind what was said
    turn([50, 51], 24)
    assert sum(accepted) > 1.2 * len(accepted) and reused[1] > 19


class Known:
    """A text and what the target makes of it: hidden [N, H], whose row p predicts position p + 1."""

    def __init__(self, family: str, wrong_every: int) -> None:
        """``wrong_every`` n makes the drafter wrong at every n-th position."""
        self.wrong_every, self._target = wrong_every, TransformersTarget(random_model(family), TAPS)

    def learn(self, text: tuple[int, ...]) -> None:
        """Take this text for the one that will be chosen."""
        self._target.clear()
        with torch.inference_mode():
            self.hidden = self._target.prefill(torch.tensor(text), False).hidden

    def is_spoiled(self, position: int) -> bool:
        return bool(self.wrong_every) and position % self.wrong_every == 0

    def accepted(self, start: int, drafts: int) -> int:
        """Return how many drafts of a block whose anchor stands at ``start`` must be accepted."""
        return next((i for i in range(drafts) if self.is_spoiled(start + 1 + i)), drafts)


class KnowingDrafter:
    """In ``DrafterModel``'s place: its hidden rows are the target's own, where it is not made wrong."""

    dtype = torch.float32
    config = SimpleNamespace(draft_rows=BLOCK, first_draft=1, mask_token_id=5)

    def __init__(self, known: Known) -> None:
        self.known = known

    def new_cache(self, draft_window: int | None = None) -> Any:
        cache = SimpleNamespace(length=0)
        cache.truncate = lambda length: setattr(cache, "length", length)
        return cache

    def write_context(self, memory: Any, taps: torch.Tensor, start: int) -> None:
        memory.length = start + len(taps)

    def draft_hidden(self, memory: Any, block: torch.Tensor, start: int) -> torch.Tensor:
        rows = self.known.hidden[start - 1 : start - 1 + BLOCK].clone()  # row k predicts start + k
        rows[0] = -rows[0]  # the anchor's row predicts nothing of use
        for k in range(1, BLOCK):
            if self.known.is_spoiled(start + k):
                rows[k] = -rows[k]
        return rows


class KnowingBlocks(PlantedBlocks):
    """The same for the fused engine: its logits are the target's own."""

    def __init__(self, known: Known, target: FusedTarget) -> None:
        super().__init__(Planted(VOCAB), target, BLOCK)
        self.selector = None  # its logits count, with noise
        self.known = known

    def block(self, _max_seq_len: int) -> None:
        start = int(self.target.start)
        self.planted.length = start
        self.drafts.copy_(self.target.head(self.known.hidden[start : start + BLOCK - 1]))
        for k in range(1, BLOCK):
            if self.known.is_spoiled(start + k):
                self.drafts[k - 1].neg_()


def knowing(known: Known, target: TransformersTarget | FusedTarget) -> DFlashProposer | KnowingBlocks:
    if isinstance(target, FusedTarget):
        return KnowingBlocks(known, target)
    return DFlashProposer(KnowingDrafter(known), target)  # type: ignore[arg-type]


@cache
def sampled_texts(family: str) -> tuple[tuple[int, ...], ...]:
    """Prompt and continuation for each case, by the definition and transformers' plain forward.

    The token at position p is the argmax of logits / temperature + noise(seed, p); temperature 0 is greedy.
    """
    model, ids = random_model(family), torch.tensor([PROMPT] * len(CASES))
    with torch.inference_mode():
        for position in range(len(PROMPT), len(PROMPT) + NEW + 2 * BLOCK):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            rows = [
                row / temperature + gumbel(seed, position, 1, VOCAB, ids.device)[0] if temperature else row
                for row, (temperature, seed) in zip(logits, CASES, strict=True)
            ]
            ids = torch.cat((ids, torch.stack(rows).argmax(-1, keepdim=True)), 1)
    return tuple(tuple(row) for row in ids.tolist())


# With log probabilities the fused engine's sampler works on the host, whatever is accepted.
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize(("logprobs", "wrong_every"), [(None, 0), (0, 5)])
def test_a_drafter_that_equals_the_target_is_right_in_every_slot_at_every_temperature(
    new_session: Callable[..., Session], family: str, wrong_every: int, logprobs: int | None
) -> None:
    """Drafts and choices share temperature and noise, so equal logits give equal ids; and the text is the definition's.

    One request after the other, so that nothing of the one before may be left.
    """
    known = Known(family, wrong_every)
    session = new_session(family, partial(knowing, known))
    for (temperature, seed), block, text in zip(CASES, BLOCKS, sampled_texts(family), strict=True):
        known.learn(text)
        sampling = SamplingParams(temperature=temperature, seed=seed)
        reply = ask(session, PROMPT, NEW, sampling=sampling, logprobs=logprobs, block_size=block)
        assert reply.ids == list(text[len(PROMPT) :][:NEW]), sampling
        start, steps = len(PROMPT), [step for step in reply.find(Step) if step.rows]
        assert len(steps) > 2
        for step in steps:
            assert (step.drafted, step.rows) == (block - 1, block)
            assert step.accepted == known.accepted(start, block - 1), f"the block at {start}"
            start += step.accepted + 1
