"""Which weight formats have run on which cards, by how many reports: ``verified.json``, which is shipped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("verified.json")


@dataclass(frozen=True, slots=True)
class Verified:
    """One format (``Plan.format``) on one card (``planner.cards``): reports of so many machines, and their source."""

    card: str
    format: str
    engine: str
    reports: int
    source: str


@cache
def verified() -> tuple[Verified, ...]:
    return tuple(Verified(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"])
