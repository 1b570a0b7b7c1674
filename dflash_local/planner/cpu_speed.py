"""How long a step and a cycle of the reference engine take on this machine's CPU, predicted from what a probe read.

A pass reads each weight once in the dtype it is computed in: the time is its bytes by the probed rate of so many rows.
"""

from __future__ import annotations

from dflash_local.config.features import ModelConfig, MoEConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.planner.cpu_probe import CpuRates
from dflash_local.planner.formats import DTYPE_BYTES, SMALL
from dflash_local.planner.memory import context_bytes_per_token, drafter_dtype, kv_bytes_per_token
from dflash_local.planner.parameters import drafter_parameters, layer_parameters, target_parameters
from dflash_local.planner.plan import Plan

# Of the probed rate the engine reaches so much, by whether one row or a block of 16 is computed; more than all of it,
# since numpy lays weights out anew for a block and the engine has done so once (models/packed_linear.py). Five runs of
# qwen3-4b with random weights and 6 layers on an AMD EPYC of two cores with AVX512-BF16, other programs beside them:
# float32 0.61, 0.67, 0.93 and 1.9, 2.0, 2.9; bfloat16 0.49, 0.79 and 2.5, 2.8, the bytes being half as many.
STEP_SHARE, BLOCK_SHARE = 0.7, 2.4
BASIS = "from this CPU's memory, probed once with numpy"


def cpu_ms(
    found: Plan, target: ModelConfig, drafter: Drafter | None, context: int
) -> tuple[float, float | None] | None:
    """Predict milliseconds of a step and of a cycle behind so many tokens; None where nothing was probed, of a toy,
    and of bitsandbytes.

    Where the CPU does not compute in the dtype itself there is no cycle, and the step is as if it did.
    """
    rates, dtype = found.machine.rates, found.dtype
    if rates is None or found.load.bitsandbytes or weights_read(target, 1) < SMALL:
        return None
    keys = _ms(rates, kv_bytes_per_token(target, dtype) * context, 1)
    step = _ms(rates, weights_read(target, 1) * DTYPE_BYTES[dtype], 1) + keys
    if drafter is None or not _computes(found):
        return step, None
    verify = _ms(rates, weights_read(target, drafter.block_size) * DTYPE_BYTES[dtype], drafter.block_size) + keys
    dtype = drafter_dtype(dtype)
    head = target.vocab_size * target.hidden_size  # which the drafter's layers share
    weights = (drafter_parameters(drafter, target.hidden_size) + head) * DTYPE_BYTES[dtype]
    rows, kept = drafter.draft_rows // drafter.passes, context_bytes_per_token(drafter, dtype) * context
    return step, verify + drafter.passes * (_ms(rates, weights, rows) + _ms(rates, kept, 1))


def basis(found: Plan) -> str:
    """Say what the times rest on."""
    if _computes(found):
        return BASIS
    return f"{BASIS}; slower, since this CPU does not compute in {found.dtype}; a cycle's time is not known"


def _computes(found: Plan) -> bool:
    """Say whether the CPU has instructions for the plan's dtype."""
    return found.dtype == "float32" or (found.dtype == "bfloat16" and found.machine.bfloat16)


def weights_read(target: ModelConfig, rows: int) -> int:
    """Count the weights that a pass over so many rows multiplies with: not the embedding, nor idle experts."""
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
