"""The fused engine's share of loading: whether it can run a pair here, and a runner ready to replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_local.engine.fused import FusedRunner
from dflash_local.engine.torch_switches import settle_torch
from dflash_local.errors import UsageError
from dflash_local.kernels.jit import HAVE_TRITON
from dflash_local.models import drafter_weights
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused import shape as fused_shape
from dflash_local.models.fused import weights as target_weights
from dflash_local.models.fused.drafter import FusedDrafter
from dflash_local.models.fused.linear import choose_tiles
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.load_target import Placement
from dflash_local.models.pair import PairFacts
from dflash_local.models.target_facts import TargetFacts

ENGINES = ("auto", "fused", "reference")
OLDEST_CARD = (8, 0)  # compute capability


def chosen_engine(wanted: str, facts: TargetFacts, contract: PairFacts | None, where: Placement) -> str:
    """``fused`` or ``reference``: ``auto`` takes the fused one on CUDA where it knows the pair.

    Raises:
        UsageError: the fused one was asked for and cannot run this; says why.
    """
    if wanted not in ENGINES:
        raise UsageError(f"unknown engine {wanted!r}", f"use {', '.join(ENGINES)}")
    if wanted == "reference":
        return wanted
    why = _refusal(facts, contract, where)
    if wanted == "fused":
        if why:
            raise UsageError(f"the fused engine cannot run this: {why}", "use --engine reference")
        return wanted
    return "fused" if not why and _has_kernels(where.device) else "reference"


def _has_kernels(device: str) -> bool:
    """True on a GPU that the kernels are compiled for: they need bfloat16 in the tensor cores."""
    if not (device.startswith("cuda") and HAVE_TRITON):
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_CARD


def _refusal(facts: TargetFacts, contract: PairFacts | None, where: Placement) -> str:
    if where.quantize is not None:
        return f"it does not know {where.quantize} weights"
    if where.dtype == torch.float16:
        return "it runs in bfloat16 or float32"
    if where.device.startswith(("mps", "balanced")):
        return f"it does not run on {where.device}"
    if contract is not None and contract.drafter.attention_bias:
        return "the drafter's projections have biases"
    return fused_shape.refusal(facts)


def load_fused(
    target_files: Checkpoint,
    drafter_files: Checkpoint | None,
    facts: TargetFacts,
    contract: PairFacts | None,
    where: Placement,
    context: int,
    *,
    attention_factor: float | None = None,
    draft_window: int | None = None,
    say: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> tuple[FusedRunner, tuple[str, ...]]:
    """Stream both models' weights, reserve the caches, and choose the products by measurement.

    Returns:
        the runner, and notices of the load.

    Raises:
        CheckpointError: a tensor is not what it must be. torch.OutOfMemoryError: it does not fit.
    """
    device = torch.device(where.device)
    shape = fused_shape.TargetShape.of(facts, str(target_files.folder / "config.json"))
    weights = target_weights.read_weights(
        target_files, facts, shape, device, where.dtype, lambda part: say("target", 0.1 + 0.6 * part)
    )
    settle_torch(sum(layer.weight.numel() for layer in weights.products), device)
    block = contract.drafter.block_size if contract is not None else 1
    target = FusedTarget(weights, shape, contract.drafter.taps if contract is not None else (), context, block)
    notices: list[str] = []
    drafter: FusedDrafter | None = None
    if contract is not None and drafter_files is not None:
        say("drafter", 0.7)
        config = contract.drafter.with_attention_factor(attention_factor)
        parts = drafter_weights.read_weights(drafter_files, config, device, where.dtype, notices.append)
        drafter = FusedDrafter(config, parts, target, draft_window)
    say("measuring", 0.85)
    choose_tiles([*weights.products, *(drafter.products if drafter is not None else ())], block)
    return FusedRunner(target, drafter, context), tuple(notices)
