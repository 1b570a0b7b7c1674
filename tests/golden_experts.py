"""Golden pairs of mixtures of experts, written where a test wants them, with the answers of an independent reference.

No code of either engine answers: texts are transformers' own greedy generation in float32, and acceptance lengths
follow from what the module that drafters are trained as drafts over the hidden states of one plain forward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from dflash_local.catalog.bundled import Pair
from dflash_local.drafters.dflash.training import DraftModule, block_inputs
from dflash_local.kernels.noise import gumbel
from tests.drafter_configs import read_decoder
from tests.expert_pairs import DRAFTER
from tests.families import HIDDEN, VOCAB, random_model
from tests.fused_models import TAPS

FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss")
# Of the random model's configuration: without, texts loop.
CHANGES: dict[str, dict[str, Any]] = {"qwen3_moe": {"initializer_range": 0.4}, "gpt_oss": {"initializer_range": 0.4}}
BLOCKS = (8, 16)
PROMPT_LENGTHS, PROMPTS = (4, 19), 6  # drawn four of each length, of which so many are taken
NEW = 18
STEPS, LEARNING_RATE = 50, 1e-2
MARGIN, DRAFT_MARGIN = 1e-3, 1e-4  # least gap of the two best logits of a choice; float32 rounds them by 1e-5
MASK = DRAFTER["dflash_config"]["mask_token_id"]


@dataclass(frozen=True)
class Answer:
    """What is right: ``NEW`` greedy ids, and by block size the tokens of each cycle, of the last one in full."""

    prompt: list[int]
    output: list[int]
    acceptance_lengths: dict[int, list[int]]


@dataclass(frozen=True)
class GoldenPair:
    """A pair in files, transformers' own target of it, and ``PROMPTS`` answers."""

    pair: Pair
    model: Any
    answers: tuple[Answer, ...]

    def chosen(self, prompt: Sequence[int], output: Sequence[int], temperature: float, seed: int) -> list[int]:
        """What is sampled behind each token of a reply by the definition: the argmax of logits / T + noise."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1] / temperature
        return (rows + gumbel(seed, len(prompt), len(output), VOCAB, rows.device)).argmax(-1).tolist()


@dataclass(frozen=True)
class _Texts:
    """Prompts of one length and their continuations: ids [prompts, N], taps [prompts, N, taps x H], gaps [prompts]."""

    prompt: int
    ids: torch.Tensor
    taps: torch.Tensor
    gaps: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, prompt: int) -> _Texts:
        drawn = torch.randint(0, VOCAB, (4, prompt), generator=torch.Generator().manual_seed(prompt))
        options = {"max_new_tokens": NEW + max(BLOCKS), "do_sample": False, "pad_token_id": 0}
        ids = model.generate(drawn, attention_mask=torch.ones_like(drawn), **options)
        seen = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        best = seen.logits[:, prompt - 1 : -1].topk(2, -1)
        assert torch.equal(best.indices[..., 0], ids[:, prompt:]), "with its caches transformers says the same"
        taps = torch.cat([seen.hidden_states[tap + 1] for tap in TAPS], -1)
        return cls(prompt, ids, taps, gap(best.values).amin(1))


def gap(best: torch.Tensor) -> torch.Tensor:
    """Between the two best of [.., 2]."""
    return best[..., 0] - best[..., 1]


def _drafted(
    module: DraftModule, model: Any, texts: _Texts, block: int, every: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [prompts, anchors, block - 1, V] behind each ``every``-th new token, and the ids that are right."""
    anchors = torch.arange(texts.prompt, texts.prompt + NEW, every).expand(len(texts.ids), -1)
    inputs = block_inputs(texts.ids, anchors, model.get_input_embeddings(), block, MASK)
    hidden = module(texts.taps, inputs, anchors)[:, :, 1:]
    at = anchors.unsqueeze(-1) + torch.arange(1, block)
    right = texts.ids.gather(1, at.flatten(1)).view_as(at)
    return model.get_output_embeddings()(hidden), right


def _trained(model: Any, groups: Sequence[_Texts]) -> DraftModule:
    """A drafter that has seen blocks of these texts, but not all of them: it accepts much, and not everything."""
    torch.manual_seed(1)
    module = DraftModule(read_decoder(DRAFTER, "the golden drafter"), HIDDEN)
    optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        logits, right = _drafted(module, model, groups[step % len(groups)], min(BLOCKS), 2)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 2), right.flatten()).backward()
        optimizer.step()
    return module.eval().requires_grad_(False)


def _cycles(logits: torch.Tensor, right: torch.Tensor) -> tuple[list[int], float]:
    """Acceptance lengths of one text, all anchors drafted [anchors, drafts, V], and the least gap of its drafts."""
    kept = (logits.argmax(-1) == right).long().cumprod(-1).sum(-1)
    gaps = gap(logits.topk(2, -1).values)
    lengths, least, at = list[int](), float("inf"), 0
    while at < NEW - 1:  # the first new token comes from the prompt pass
        lengths.append(int(kept[at]) + 1)
        least = min(least, float(gaps[at, : lengths[-1]].min()))
        at += lengths[-1]
    return lengths, least


def write_pair(family: str, folder: Path) -> GoldenPair:
    """A random target of the family and a drafter trained for it, both in float32."""
    model = random_model(family, **CHANGES.get(family, {})).requires_grad_(False)
    groups = [_Texts.of(model, length) for length in PROMPT_LENGTHS]
    module = _trained(model, groups)
    answers = []
    for texts in groups:
        logits, right = _drafted(module, model, texts, max(BLOCKS), 1)
        for text, ids in enumerate(texts.ids.tolist()):
            # A shorter block is the beginning of one of the trained size.
            cycles = {block: _cycles(logits[text, :, : block - 1], right[text, :, : block - 1]) for block in BLOCKS}
            if texts.gaps[text] > MARGIN and min(least for _, least in cycles.values()) > DRAFT_MARGIN:
                prompt, output = ids[: texts.prompt], ids[texts.prompt : texts.prompt + NEW]
                answers.append(Answer(prompt, output, {block: lengths for block, (lengths, _) in cycles.items()}))
    assert len(answers) >= PROMPTS, "too many near-ties: take another seed"
    target, drafter = folder / "target", folder / "drafter"
    model.save_pretrained(target)
    drafter.mkdir()
    save_file(module.state_dict(), drafter / "model.safetensors", metadata={"format": "pt"})
    (drafter / "config.json").write_text(json.dumps(DRAFTER), encoding="utf-8")
    taken = answers[: PROMPTS // 2] + answers[-PROMPTS // 2 :]  # of either length
    return GoldenPair(Pair(family, target, drafter, bundled=False), model, tuple(taken))
