"""A prompt's experts against plain PyTorch, in Triton's interpreter: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dflash_local.config.features import ClampedSwiGLU
from dflash_local.kernels import expert_prefill, fragment_decode
from dflash_local.kernels.experts import Activation, ExpertWeight, Routing
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.layout import moe
from tests.quantized_weights import int4, mxfp4

EXPERTS, SLOTS, HIDDEN, INNER = 5, 3, 96, 64
CARD = DeviceProperties(2**17, 16, (8, 0))


def with_kernels(answer: bool) -> None:
    """Kernels from now on, in float32 too, or plain PyTorch."""
    modules: tuple[Any, ...] = (expert_prefill, fragment_decode)
    for module in modules:
        module.device_properties = lambda _device: CARD
        module.runs_kernels = lambda _tensor: answer
    modules[0]._takes = lambda _x, _weight: answer


def given(rows: int, form: str, biased: bool) -> tuple[torch.Tensor, ExpertWeight, ExpertWeight, Routing]:
    """Rows that take three of the first four experts; the last expert, which nobody takes, is NaN where it can be."""
    torch.manual_seed(rows)

    def weight(out_features: int, in_features: int) -> ExpertWeight:
        shape = EXPERTS * out_features, in_features
        matrices: Any = torch.randn(shape) * in_features**-0.5
        matrices[-out_features:] = torch.nan
        if form != "plain":
            matrices = FragmentWeight.of(mxfp4(*shape) if form == "mxfp4" else int4(*shape, 32))
        return ExpertWeight(matrices, EXPERTS, torch.randn(EXPERTS, out_features) if biased else None)

    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:SLOTS] for _ in range(rows)])
    routing = Routing(torch.rand(rows, SLOTS), chosen.int())
    return torch.randn(rows, HIDDEN), weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER), routing


def difference(rows: int, form: str, biased: bool, activation: Activation) -> float:
    """The largest one, by the largest of the numbers; NaN where there is one."""
    x, gate_up, down, routing = given(rows, form, biased)
    found = []
    for kernels in (True, False):
        with_kernels(kernels)
        found.append(expert_prefill.experts_prefill(x, gate_up, down, routing, activation))
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())


def checks() -> Iterator[tuple[str, float]]:
    yield "experts, whole tiles", difference(160, "plain", False, "silu")
    yield "experts, clamped, biased, mxfp4", difference(3, "mxfp4", True, ClampedSwiGLU())
    limits: Any = moe
    limits.DECODED_SLICE, limits.SLICE_OF_SLOT, limits.PREFILL_SCRATCH = 2 * 2 * INNER * HIDDEN, 0, 40_000
    yield "experts by parts, rows by parts", difference(40, "int4", True, "silu")
