"""What a loaded pair holds, and thus what would be free without it."""

from __future__ import annotations

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import ModelConfig
from dflash_local.loaded import SessionFacts
from dflash_local.planner import formats, fused_memory, memory
from dflash_local.planner.load import Load
from dflash_local.planner.wish import FORMATS


def held(target: ModelConfig, drafter: DrafterConfig | None, facts: SessionFacts) -> int:
    """Bytes of its device that a loaded pair holds from its load to its end.

    What a reply takes besides is left out: between replies it may be free already.

    Args:
        target, drafter: what was loaded. facts: how it was loaded.
    """
    kind = facts.device.partition(":")[0]
    device = kind if kind in ("cpu", "mps") else "cuda"
    packed = facts.dtype in FORMATS
    load = Load(
        formats.default_dtype(device) if packed else facts.dtype,
        facts.dtype if packed else None,
        facts.context,
        facts.block_size,
        device,
        exact=facts.exact,
        draft_side=facts.draft_side,
        narrow_kv=facts.kv_cache == "fp8",
    )
    made = fused_memory.ledger if facts.engine == "fused" else memory.ledger
    return made(target, drafter if facts.drafter is not None else None, load).loading.bytes or 0
