"""Fused targets with the weights of the tiny random models, and planted drafters in the fused runner's form."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dflash_local.config.features import MLPConfig, ModelConfig
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels.choose import GREEDY, Choosing, RowChooser
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.target_facts import TargetFacts
from dflash_local.request import SamplingParams
from tests.families import save_model
from tests.proposers import Planted

FAMILIES = (
    *("qwen3", "llama", "llama_biased", "mistral", "mistral_full", "gemma2_full", "gpt_oss_dense", "qwen3_5"),
    *("qwen3_5_biased", "qwen3_moe", "qwen3_next", "qwen3_5_moe"),
)
TAPS = (0, 2)
ROWS = 16

__all__ = ["FAMILIES", "PlantedBlocks", "fused_target"]


def without_experts(model: ModelConfig) -> ModelConfig:
    """The model with a dense feed-forward part in place of each mixture, as wide as a routed expert."""
    layers = (replace(layer, mlp=MLPConfig(layer.mlp.intermediate_size)) for layer in model.layers)
    return replace(model, layers=tuple(layers))


@cache
def _weights(family: str, device: str) -> tuple[TargetWeights, ModelConfig]:
    with TemporaryDirectory() as folder:
        checkpoint = Checkpoint.open(save_model(family, Path(folder)))
        facts = TargetFacts.from_checkpoint(checkpoint)
        if family == "gpt_oss_dense":
            facts = replace(facts, model=without_experts(facts.model))
        return read_weights(checkpoint, facts, torch.device(device), torch.float32), facts.model


def fused_target(family: str, context: int, rows: int = ROWS, device: str = "cpu", **options: Any) -> FusedTarget:
    """A target of the weights that ``families.random_model`` gives."""
    weights, model = _weights(family, device)
    return FusedTarget(weights, model, TAPS, context, rows, **options)


class PlantedChoice(RowChooser):
    """The best ids, as sure as a planted drafter says."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    def choose(self, logits: torch.Tensor, out: torch.Tensor, how: Choosing = GREEDY) -> None:
        out.copy_(logits.argmax(-1))
        if how.margins is not None:
            how.margins.copy_(self.planted.confidences(len(how.margins)))


class PlantedBlocks:
    """A planted drafter as the fused runner takes one: its ids become logits."""

    chained = False
    head_ids = None
    caches = ()

    def __init__(self, planted: Planted, target: FusedTarget, rows: int = ROWS) -> None:
        self.planted, self.target = planted, target
        self.selector: RowChooser | None = PlantedChoice(planted)
        self.drafts = torch.zeros(rows - 1, target.vocab_size, device=target.device)
        self._sampler = Sampler(SamplingParams(), 0, target.vocab_size, target.tokens[:0])

    @property
    def length(self) -> int:
        return self.planted.length

    @length.setter
    def length(self, length: int) -> None:
        self.planted.length = length

    def block(self, _max_seq_len: int) -> None:
        start = int(self.target.start)
        self.planted.length = start  # the host's count may lag behind the device's
        ids, _ = self.planted.propose([*[0] * start, int(self.target.tokens[0])], len(self.drafts), self._sampler, None)
        self.drafts.zero_().scatter_(1, ids.unsqueeze(1), 1.0)

    def reusable(self, length: int) -> int:
        return length

    def snapshot(self) -> None:
        """There is no context."""

    def inject(self, taps: torch.Tensor) -> None:
        """The planted ones read no taps."""

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        self.planted.extend(taps, start)
