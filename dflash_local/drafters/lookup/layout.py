"""Describe drafts that are copied from the text itself (prompt lookup): what stood behind the longest earlier match of
its last ids. No weights, no taps, any target. Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import MAX_BLOCK, MIN_BLOCK, Drafter
from dflash_local.layout.part_layout import EngineSpec
from dflash_local.layout.traffic import Traffic

SHORTEST, LONGEST = 3, 32  # ids of a match that are compared
NEWEST = 64  # earlier places that are compared, from the newest on


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


class TextIndex:
    """Holds where each run of three ids ends in the text, so that a match is found without reading all of it."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # places behind a run, oldest first

    def truncate(self, length: int) -> None:
        """Forget what stands at ``length`` or behind it."""
        for end in range(len(self._text), max(length, SHORTEST - 1), -1):
            self._ends[self._run(end)].pop()
        del self._text[length:]

    def draft(self, ids: Sequence[int], count: int) -> tuple[list[int], float]:
        """Copy at most ``count`` ids, and not more than matched; and the binary logarithm of how many did.

        Args:
            ids: the whole text. It begins with what there was before, but for what was truncated.
        """
        for token in ids[len(self._text) :]:
            self._text.append(token)
            if len(self._text) >= SHORTEST:
                self._ends.setdefault(self._run(len(self._text)), []).append(len(self._text))
        text = self._text
        if len(text) < SHORTEST:
            return [], 0.0
        earlier = self._ends[self._run(len(text))][-1 - NEWEST : -1]
        best, matched = 0, 0
        for end in reversed(earlier):
            length = SHORTEST
            while length < min(LONGEST, end) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if length > matched:
                best, matched = end, length
        copied: list[int] = []
        for place in range(best, best + min(count, matched)):
            # A match may end within the last few ids: what repeats goes on repeating.
            copied.append(text[place] if place < len(text) else copied[place - len(text)])
        return copied, math.log2(max(matched, 1))

    def _run(self, end: int) -> tuple[int, ...]:
        return tuple(self._text[end - SHORTEST : end])


CONFIG = LookupConfig
