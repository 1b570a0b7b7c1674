"""The part of a mixture of experts with the kernels of a card, whose sources run on the CPU: as PyTorch's products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dflash_local.check.experts import try_mixture
from dflash_local.kernels import expert_gemm
from dflash_local.kernels.expert_gemm import DownConfig, GateUpConfig
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.moe import MoE
from dflash_local.models.fused.routed_experts import ExpertKernels
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.families import save_model
from tests.host_cuda import HostKernel, compiler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="g++ on Linux stands in for the card"
)
ROWS, CPU = 20, torch.device("cpu")
CARD = DeviceProperties(99 * 1024, 3, (9, 0))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make = expert_gemm.make_kernel
    assert make is not None
    monkeypatch.setattr(expert_gemm, "make_kernel", lambda source, options, *_: HostKernel.of(source, options))
    monkeypatch.setattr(expert_gemm, "_kernels", {})
    monkeypatch.setattr(expert_gemm, "device_properties", lambda device: CARD)
    expert_gemm._route_kernel.cache_clear()


def part_of(family: str, folder: Path, **sizes: int) -> MoE:
    """The mixture of a tiny model's second layer in bfloat16."""
    save_model(family, folder, **sizes)
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    target = FusedTarget(read_weights(checkpoint, facts, CPU, torch.bfloat16), facts.model, (0, 2), 64, ROWS)
    part = target.layers[1].mlp
    assert isinstance(part, MoE)
    return part


CASES = {
    "one that is shared": ("qwen3_5_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "a shared expert of its own": ("qwen3_5_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}),
    "no shared expert": ("qwen3_moe", {"moe_intermediate_size": 32}),
    "biases and a clamp": ("gpt_oss", {"intermediate_size": 32}),
}  # fmt: skip


# The least expensive one; tests/kernels/test_expert_gemm_on_host.py has the others' kernels, the long tests all.
HERE = ("biases and a clamp",)


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in HERE else pytest.mark.slow) for case in CASES])
def test_a_block_of_two_launches_is_as_without_kernels(case: str, tmp_path: Path) -> None:
    family, sizes = CASES[case]
    part = part_of(family, tmp_path / "model", **sizes)
    experts, mixture = part.weights.experts, part.weights.mixture
    x = torch.randn(ROWS, experts.gate_up.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    for rows in (ROWS, 3):
        experts.kernels = None
        want = part.block(x[:rows], torch.empty_like(x[:rows]), None).clone()
        added = part.block(x[:rows], x[:rows].clone(), x[:rows])
        configs = GateUpConfig(1, 2, 1, 2), DownConfig(2, 1, 2)
        experts.kernels = ExpertKernels(mixture, {8: configs, 16: configs})
        found = part.block(x[:rows], torch.empty_like(x[:rows]), None).clone()
        assert (found - want).float().norm() < 1e-2 * want.float().norm()
        assert torch.allclose(part.block(x[:rows], x[:rows].clone(), x[:rows]), added, atol=0.05)
    assert all(each.error < 0.5 for each in try_mixture(part, 16))
