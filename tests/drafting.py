"""Real drafters and drafters that know what the target will choose, for sessions of either engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.drafters.dflash.reference import DFlashProposer, DrafterModel
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels.noise import gumbel
from dflash_local.models.drafter_weights import random_weights
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams
from tests.drafter_configs import read_decoder
from tests.engine_sessions import BLOCK
from tests.families import HIDDEN, VOCAB, random_model
from tests.fused_models import TAPS, PlantedBlocks
from tests.proposers import Oracle, Planted, decode

CPU = torch.device("cpu")
MASK = 5
CONFIG = read_decoder(
    {
        "architectures": ["DFlashDraftModel"], "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "block_size": BLOCK, "rope_theta": 1e4,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "vocab_size": VOCAB,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
    },
    Path("config.json"),
)  # fmt: skip


class Draft(NamedTuple):
    """What a block drafted: logits [drafts, V] of the positions after ``start``, where the anchor stands."""

    start: int
    anchor: int
    logits: torch.Tensor


class Overhears(Sampler):
    """Keeps the drafter's logits."""

    def draft(self, logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        self.logits = logits.clone()
        return super().draft(logits, noise)


class NotedProposer(DFlashProposer):
    """The real drafter with random weights: what it drafts is noted, and what the oracle says is proposed."""

    def __init__(self, target: TransformersTarget) -> None:
        super().__init__(DrafterModel.random(CONFIG, target_hidden=HIDDEN, seed=1), target)
        self.oracle, self.noted = Oracle(VOCAB, ()), list[Draft]()

    def propose(self, ids: Sequence[int], count: int, sampler: Sampler, noise: torch.Tensor | None) -> torch.Tensor:
        listener = Overhears(SamplingParams(), 0, VOCAB, torch.tensor([0]))
        super().propose(ids, count, listener, None)
        start = len(ids) - 1
        self.noted.append(Draft(start, ids[-1], listener.logits))
        return torch.tensor([self.oracle.token(start + 1 + i) % VOCAB for i in range(count)])


class NotedBlocks(DFlashBlocks):
    """The same for the fused engine."""

    def __init__(self, target: FusedTarget) -> None:
        super().__init__(CONFIG, random_weights(CONFIG, HIDDEN, 1, CPU, torch.float32), target)
        self.oracle, self.noted = Oracle(VOCAB, ()), list[Draft]()

    def block(self, max_seq_len: int) -> None:
        super().block(max_seq_len)
        start = int(self.target.start)
        self.noted.append(Draft(start, int(self.target.tokens[0]), self.drafts.clone()))
        ids = torch.tensor([self.oracle.token(start + 1 + i) % VOCAB for i in range(len(self.drafts))])
        self.drafts.zero_().scatter_(1, ids.unsqueeze(1), 1e6)


def noted(target: TransformersTarget | FusedTarget) -> NotedProposer | NotedBlocks:
    """A real drafter for the target of either engine."""
    return NotedBlocks(target) if isinstance(target, FusedTarget) else NotedProposer(target)


@cache
def aside(family: str) -> TransformersTarget:
    """A target that no session holds."""
    return TransformersTarget(random_model(family), TAPS)


def greedy_text(family: str, prompt: Sequence[int], new: int = 80) -> list[int]:
    """Prompt and the target's own greedy continuation, without touching any session's caches."""
    return decode(aside(family), prompt, new)[0]


def cold_logits(family: str, text: Sequence[int], starts: Sequence[int]) -> dict[int, torch.Tensor]:
    """What the drafter of ``noted`` drafts at each of the ``starts`` when the text before it came as one prompt."""
    target, drafter = aside(family), DrafterModel.random(CONFIG, target_hidden=HIDDEN, seed=1)
    target.clear()
    found = {}
    with torch.inference_mode():
        taps = target.prefill(torch.tensor(list(text)), True).taps
        assert taps is not None
        for start in starts:
            memory = drafter.new_cache()
            drafter.write_context(memory, taps[:start], 0)
            block = target.embed(torch.tensor([text[start], *[MASK] * (BLOCK - 1)]))
            found[start] = target.head(drafter.draft_hidden(memory, block, start)[1:])
    return found


@cache
def sampled_texts(
    family: str, prompt: tuple[int, ...], cases: tuple[tuple[float, int], ...], new: int
) -> tuple[tuple[int, ...], ...]:
    """Prompt and continuation for each (temperature, seed), by the definition and transformers' plain forward.

    The token at position p is the argmax of logits / temperature + noise(seed, p); temperature 0 is greedy.
    """
    model, ids = random_model(family), torch.tensor([prompt] * len(cases))
    with torch.inference_mode():
        for position in range(len(prompt), len(prompt) + new):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            rows = [
                row / temperature + gumbel(seed, position, 1, VOCAB, CPU)[0] if temperature else row
                for row, (temperature, seed) in zip(logits, cases, strict=True)
            ]
            ids = torch.cat((ids, torch.stack(rows).argmax(-1, keepdim=True)), 1)
    return tuple(tuple(row) for row in ids.tolist())


class Known:
    """A text and what the target makes of it: hidden [N, H], whose row p predicts position p + 1."""

    def __init__(self, family: str, wrong_every: int) -> None:
        """Nothing is known yet. ``wrong_every`` n makes the drafter wrong at every n-th position."""
        self.family, self.wrong_every = family, wrong_every

    def learn(self, text: tuple[int, ...]) -> None:
        """This text is the one that will be chosen."""
        target = aside(self.family)
        target.clear()
        with torch.inference_mode():
            self.hidden = target.prefill(torch.tensor(text), False).hidden

    def spoiled(self, position: int) -> bool:
        """Whether the drafter is made wrong there."""
        return bool(self.wrong_every) and position % self.wrong_every == 0

    def accepted(self, start: int, drafts: int) -> int:
        """Drafts that must be accepted of a block whose anchor stands at ``start``."""
        return next((i for i in range(drafts) if self.spoiled(start + 1 + i)), drafts)


class _Memory:
    length = 0

    def truncate(self, length: int) -> None:
        self.length = length


class KnowingDrafter:
    """In ``Drafter``'s place: its hidden rows are the target's own, where it is not made wrong."""

    dtype = torch.float32
    config = SimpleNamespace(draft_rows=BLOCK, first_draft=1, mask_token_id=MASK)

    def __init__(self, known: Known) -> None:
        self.known = known

    def new_cache(self, draft_window: int | None = None) -> _Memory:
        return _Memory()

    def write_context(self, memory: _Memory, taps: torch.Tensor, start: int) -> None:
        memory.length = start + len(taps)

    def draft_hidden(self, memory: _Memory, block: torch.Tensor, start: int) -> torch.Tensor:
        rows = self.known.hidden[start - 1 : start - 1 + BLOCK].clone()  # row k predicts start + k
        rows[0] = -rows[0]  # the anchor's row predicts nothing of use
        for k in range(1, BLOCK):
            if self.known.spoiled(start + k):
                rows[k] = -rows[k]
        return rows


class KnowingBlocks(PlantedBlocks):
    """The same for the fused engine: its logits are the target's own."""

    def __init__(self, known: Known, target: FusedTarget) -> None:
        super().__init__(Planted(VOCAB), target, BLOCK)
        self.known = known

    def block(self, _max_seq_len: int) -> None:
        start = int(self.target.start)
        self.planted.length = start
        self.drafts.copy_(self.target.head(self.known.hidden[start : start + BLOCK - 1]))
        for k in range(1, BLOCK):
            if self.known.spoiled(start + k):
                self.drafts[k - 1].neg_()


def knowing(known: Known, target: TransformersTarget | FusedTarget) -> DFlashProposer | KnowingBlocks:
    """A drafter for the target of either engine that is right where it is not made wrong."""
    if isinstance(target, FusedTarget):
        return KnowingBlocks(known, target)
    return DFlashProposer(KnowingDrafter(known), target)  # type: ignore[arg-type]
