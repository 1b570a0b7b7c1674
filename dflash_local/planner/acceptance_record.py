"""How many tokens a cycle wrote in the replies of this machine, by target: what predictions take once it is known.

One JSON file in the cache folder: target -> tokens and cycles, of which older ones weigh ever less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.planner.speed import Acceptance
from dflash_local.store.kept import keep

ENOUGH = 512  # tokens from which the mean stands instead of published ones
MANY = 65_536  # tokens at which all counts are halved, so that what was written lately weighs more


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens that drafting cycles wrote, bonus tokens included, and those cycles."""

    tokens: int
    cycles: int

    def plus(self, tokens: int, cycles: int) -> Count:
        """With those of another reply."""
        found = Count(self.tokens + tokens, self.cycles + cycles)
        return found if found.tokens < MANY else Count(found.tokens // 2, max(1, found.cycles // 2))

    @property
    def acceptance(self) -> Acceptance | None:
        """One length; None before enough was written."""
        if self.tokens < ENOUGH:
            return None
        mean = self.tokens / self.cycles
        return Acceptance(mean, mean, f"measured here over {self.tokens:,} tokens")


class AcceptanceRecord:
    """The counts of this machine. folder: None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "acceptance.json"

    def read(self) -> dict[str, Count]:
        """By target, as ``ModelConfig.source``; whatever of the file is as it should be."""
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8")) if self.path else {}
        except (OSError, ValueError):
            return {}
        found = entries if isinstance(entries, Mapping) else {}
        return {name: Count(*count) for name, count in found.items() if _is_count(count)}

    def add(self, target: str, lengths: tuple[int, ...]) -> None:
        """Count the cycles of a reply in. lengths: tokens that each wrote."""
        if self.path is None or not lengths:
            return
        counts = self.read()
        counts[target] = counts.get(target, Count(0, 0)).plus(sum(lengths), len(lengths))
        entries = {name: [count.tokens, count.cycles] for name, count in counts.items()}
        keep(self.path, json.dumps(entries, indent=1) + "\n")


def _is_count(entry: Any) -> bool:
    if not (isinstance(entry, list) and len(entry) == 2):
        return False
    return all(type(each) is int for each in entry) and 0 < entry[1] <= entry[0] <= MANY
