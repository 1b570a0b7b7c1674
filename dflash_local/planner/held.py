"""What a loaded pair holds, and thus what would be free without it."""

from __future__ import annotations

from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.layout.quantized import quantized
from dflash_local.loaded import SessionFacts
from dflash_local.planner import fused_memory, memory
from dflash_local.planner.load import Load


def held(target: ModelConfig, drafter: Drafter | None, facts: SessionFacts) -> int:
    """Bytes of its device that a loaded pair holds from its load to its end.

    What a reply takes besides is left out: between replies it may be free already.

    Args:
        target, drafter: what was loaded. facts: how it was loaded.
    """
    kind = facts.device.partition(":")[0]
    load = Load.of(kind, facts.load, facts.context, facts.block_size)
    target = quantized(target, facts.load.quantize)
    made = fused_memory.ledger if facts.engine == "fused" else memory.ledger
    return made(target, drafter if facts.drafter is not None else None, load).loading.bytes or 0
