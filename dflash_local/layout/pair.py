"""All tensors of a pair in the fused engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dflash_local.config.features import ModelConfig
from dflash_local.layout import cycle, target
from dflash_local.layout.buffer import Group, group_bytes
from dflash_local.layout.draft_head import draft_head_buffers
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.load_config import DrafterPrecision

if TYPE_CHECKING:
    from dflash_local.drafters.drafter import Drafter


@lru_cache(maxsize=2048)  # a registry of pairs, each in some 80 formats, variants, drafter precisions and offloads
def _weight_bytes(model: ModelConfig, draft: Drafter | None, spec: EngineSpec) -> Mapping[Group, int]:
    sums = Counter(target.weight_bytes(model, "model.", spec.dtype, "embedding" in spec.offloaded))
    if draft is not None:
        sums.update(_drafter_bytes(draft, model.hidden_size, spec.dtype, spec.precision))
        sums.update(group_bytes(draft_head_buffers(model, spec)))
    return sums


@lru_cache(maxsize=256)  # a drafter stands beside its target in all of its formats
def _drafter_bytes(draft: Drafter, hidden: int, dtype: str, precision: DrafterPrecision) -> Mapping[Group, int]:
    return group_bytes(draft.weights(hidden, dtype, draft.formats, precision))


def bytes_by_group(model: ModelConfig, draft: Drafter | None, spec: EngineSpec) -> dict[Group, int]:
    """Return bytes of what stands from load to close; those of weights are kept for plans of many contexts."""
    weights = replace(spec, context=0, kv_cache="auto")  # no weight depends on these
    sums: Counter[Group] = Counter(_weight_bytes(model, draft, weights))
    sums.update(target.state_bytes(model, spec))
    block = [
        *target.block_buffers(model, model.vocab_size, spec),
        *cycle.cycle_buffers(spec.rows, model.vocab_size).all(),
    ]
    block += () if draft is None else draft.buffers(model.vocab_size, spec)
    sums.update(group_bytes(block))
    return dict(sums)
