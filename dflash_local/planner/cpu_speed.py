"""How long a step and a cycle of the reference engine take on this machine's CPU, predicted from what a probe read.

A pass reads each weight once in the dtype it is computed in: the time is its bytes by the probed rate of so many rows.
"""

from __future__ import annotations

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import ModelConfig, MoEConfig
from dflash_local.planner.cpu_probe import CpuRates
from dflash_local.planner.formats import DTYPE_BYTES
from dflash_local.planner.memory import context_bytes_per_token, drafter_dtype, kv_bytes_per_token
from dflash_local.planner.parameters import drafter_parameters, layer_parameters, target_parameters
from dflash_local.planner.plan import Plan

# Of the probed rate the engine reaches so much, by whether one row or a block is computed: in float32 on two cores, the
# mean of three runs of benchmarks/cpu_speed.py (0.67 to 0.68, 0.84 to 0.87).
STEP_SHARE, BLOCK_SHARE = 0.67, 0.85
SMALL = 50_000_000  # weights read by a pass below which the caches hold them, and a toy's time is Python's
BASIS = "from this CPU's memory, probed once with numpy"


def cpu_ms(
    found: Plan, target: ModelConfig, drafter: DrafterConfig | None, context: int
) -> tuple[float, float | None] | None:
    """Milliseconds of a step and of a cycle behind so many tokens; None where nothing was probed, of a toy, and of
    bitsandbytes.

    In bfloat16 there is no cycle, and the step is as if the CPU computed in it: no probe by numpy tells more.
    """
    rates, dtype = found.machine.rates, found.dtype
    if rates is None or found.load.bitsandbytes or weights_read(target, 1) < SMALL:
        return None
    step = _pass_ms(rates, target, 1, dtype, context)
    if drafter is None or dtype != "float32":
        return step, None
    verify = _pass_ms(rates, target, drafter.block_size, dtype, context)
    return step, verify + _draft_ms(rates, target, drafter, dtype, context)


def basis(dtype: str) -> str:
    """What the times rest on."""
    if dtype == "float32":
        return BASIS
    return f"{BASIS}; slower where the CPU does not compute in {dtype}; a cycle's time is not known"


def _pass_ms(rates: CpuRates, target: ModelConfig, rows: int, dtype: str, context: int) -> float:
    """Of the target over so many rows."""
    weights = weights_read(target, rows) * DTYPE_BYTES[dtype]
    return _ms(rates, weights, rows) + _ms(rates, kv_bytes_per_token(target, dtype) * context, 1)


def _draft_ms(rates: CpuRates, target: ModelConfig, drafter: DrafterConfig, dtype: str, context: int) -> float:
    """Of drafting a block, by the drafter's layers and the target's head."""
    dtype = drafter_dtype(dtype)
    head = target.vocab_size * target.hidden_size
    weights = (drafter_parameters(drafter, target.hidden_size) + head) * DTYPE_BYTES[dtype]
    return _ms(rates, weights, drafter.draft_rows) + _ms(rates, context_bytes_per_token(drafter, dtype) * context, 1)


def weights_read(target: ModelConfig, rows: int) -> int:
    """Weights of the target that a pass over so many rows multiplies with: not the embedding, nor idle experts."""
    counts = target_parameters(target)
    embedding = counts.embedding if counts.head else 0  # a tied one is the head
    idle = 0.0
    for layer, count in target.layer_kinds.items():
        if isinstance(layer.mlp, MoEConfig):
            taken = (layer.mlp.num_experts_per_tok or layer.mlp.num_experts) / layer.mlp.num_experts
            share = (1 - taken) ** rows  # of the experts that no row takes, if choices are even
            idle += count * share * layer_parameters(layer, target.hidden_size).experts
    return round(counts.total - embedding - idle)


def _ms(rates: CpuRates, size: int, rows: int) -> float:
    return 1e3 * size / (rates.rate(rows) * (STEP_SHARE if rows == 1 else BLOCK_SHARE))
