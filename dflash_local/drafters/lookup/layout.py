"""Describe a drafter without weights or taps, for any target: all drafts are copied from the text itself
(``engine.copied_drafts``), as other drafters have it beside their own. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import MAX_BLOCK, MIN_BLOCK, Drafter
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupConfig(Drafter):
    """The kind, whose ``config.json`` says its block size alone."""

    kind: ClassVar[str] = "lookup"
    stored: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str, inferred: Collection[str] = ()) -> LookupConfig:
        block = ConfigFields(config, source).integer("block_size", MIN_BLOCK, MAX_BLOCK)
        return cls(block_size=block, source=source, inferred=tuple(inferred))

    def fused_refusal(self) -> str:
        return ""

    def traffic(self, target: ModelConfig, spec: EngineSpec) -> Traffic:
        return Traffic({}, {}, Counter(), 0, {}, 1)


CONFIG = LookupConfig
