"""What the drafted replies of this machine brought, by target: tokens, and how many rows their cycles verified.

One JSON file in the cache folder, in which older replies weigh ever less. How long a cycle of so many rows takes
depends on the card and is not kept here (``planner.speed_record``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.events import Stats
from dflash_local.planner.speed import ExpectedAcceptance, Prediction
from dflash_local.store.kept import keep, read_kept

ENOUGH = 512  # tokens from which the mean stands instead of published ones
MEASURED = "measured here"  # begins the source of lengths that are of this machine's replies
MANY = 65_536  # tokens that a target's count holds; beyond them all are scaled down, so that the latest weigh more


@dataclass(frozen=True, slots=True)
class Count:
    """Counts tokens that cycles emitted, bonus tokens included, and those cycles by their rows.

    Attributes:
        cycles: the steps that drafted nothing are those of one row. Scaled down, cycles and tokens are no whole
            numbers.
    """

    tokens: float
    cycles: Mapping[int, float]

    def plus(self, tokens: float, cycles: Mapping[int, float]) -> Count:
        """Add those of another reply."""
        tokens += self.tokens
        share = min(1.0, MANY / tokens)
        rows = self.cycles.keys() | cycles.keys()
        both = {each: (self.cycles.get(each, 0) + cycles.get(each, 0)) * share for each in sorted(rows)}
        return Count(min(tokens, MANY), both)

    def predict(self, found: Prediction) -> Prediction:
        """Correct a prediction by the tokens and the mix of cycles of these replies, once there are enough."""
        if self.tokens < ENOUGH:
            return found
        mean = self.tokens / sum(self.cycles.values())
        lengths = ExpectedAcceptance(mean, mean, f"{MEASURED} over {self.tokens:,.0f} tokens")
        return replace(found, times=tuple(each.mixed(self.cycles) for each in found.times), acceptance=lengths)


class AcceptanceRecord:
    """Keeps the counts of this machine; nothing where ``folder`` is None."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "acceptance.json"

    def read(self) -> dict[str, Count]:
        """Read whatever of the file is as it should be, by target, as ``ModelConfig.source``."""
        found = read_kept(self.path, lambda entries: {name: _count(entry) for name, entry in entries.items()})
        return {name: count for name, count in (found or {}).items() if count is not None}

    def add_reply(self, target: str, block_size: int, reply: Stats) -> None:
        """Count a reply in, where it was drafted with the pair's own ``block_size``."""
        if reply.mode == "dflash" and reply.block_size == block_size:
            self.add(target, sum(reply.acceptance_lengths) + reply.undrafted_cycles, dict(reply.verify_rows))

    def add(self, target: str, tokens: int, cycles: Mapping[int, int]) -> None:
        """Count cycles in. cycles: how many there were of each number of rows."""
        if self.path is None or not cycles:
            return
        counts = self.read()
        counts[target] = counts.get(target, Count(0, {})).plus(tokens, cycles)
        entries = {name: {"tokens": count.tokens, "cycles": count.cycles} for name, count in counts.items()}
        keep(self.path, json.dumps(entries, indent=1) + "\n")


def _count(entry: Any) -> Count | None:
    """Read an entry of the file; None where it is none."""
    try:
        found = Count(entry["tokens"], {int(rows): count for rows, count in entry["cycles"].items()})
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    numbers = (found.tokens, *found.cycles, *found.cycles.values())
    right = all(type(each) in (int, float) and 0 <= each < MANY + 1 for each in numbers)  # 1: what rounding adds
    return found if right and sum(found.cycles.values()) > 0 else None
