"""What a loaded pair holds, and thus what would be free without it."""

from __future__ import annotations

from dflash_local.loaded import SessionFacts
from dflash_local.planner import fused_memory, memory
from dflash_local.planner.load import Load
from dflash_local.planner.shape import DrafterShape, TargetShape


def held(target: TargetShape, drafter: DrafterShape | None, facts: SessionFacts) -> int:
    """Bytes of its device that a loaded pair holds from its load to its end; 0 where a number is missing.

    What a reply takes besides is left out: between replies it may be free already.

    Args:
        target, drafter: the shapes of what was loaded. facts: how it was loaded.
    """
    kind = facts.device.partition(":")[0]
    load = Load.of(kind, facts.load, facts.context, facts.block_size)
    made = fused_memory.ledger if facts.engine == "fused" else memory.ledger
    return made(target, drafter if facts.drafter is not None else None, load).loading.bytes or 0
