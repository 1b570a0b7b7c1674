"""Kernels that are set up while the ones before them run see all that those wrote, and overwrite nothing too early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.models.fused.kernel_choice import choose_configs
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from tests.both_engines import facts_of
from tests.families import save_model
from tests.quantized_checkpoints import quantize_checkpoint

pytestmark = pytest.mark.gpu


def test_a_block_replayed_gives_the_bits_of_kernels_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3_5", tmp_path / "twin", hidden_size=256, intermediate_size=512, head_dim=64)
    quantize_checkpoint(tmp_path / "twin", tmp_path / "quantized", "gptq")
    checkpoint, facts = facts_of(tmp_path / "quantized")
    weights = read_weights(checkpoint, facts, torch.device("cuda"), torch.bfloat16)
    choose_configs(weights.products, 8)
    target = FusedTarget(weights, facts.model, (0, 2), 64, 8)
    target.prefill(torch.arange(5, 12, device="cuda"), False)
    target.tokens[:8] = torch.arange(12, 20, device="cuda")

    def block() -> None:
        target.block(8, 32, True)

    block()
    monkeypatch.setattr("dflash_local.kernels.jit._overlaps", lambda _device: False)
    block()
    torch.cuda.synchronize()
    want, taps = target.logits[:8].clone(), target.tapped[:8].clone()
    monkeypatch.undo()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2000):
        target.logits.fill_(float("nan"))
        graph.replay()
        wrong += (target.logits[:8] != want).sum() + (target.tapped[:8] != taps).sum()
    assert want.isfinite().all() and int(wrong) == 0
