"""What steps and cycles took on the cards of this machine: what later predictions on them rest on.

One JSON file for each card in the cache folder; the newest measurement of a plan replaces the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dflash_local.load_config import LoadConfig
from dflash_local.planner.cards import file_stem
from dflash_local.planner.plan import Plan
from dflash_local.planner.speed import Prediction, Times
from dflash_local.store.kept import keep, read_kept
from dflash_local.tables import counted

KEPT = 200  # measurements of a card, the newest
NEAR = 0.5  # a context that differs by less than this share is the same


@dataclass(frozen=True, slots=True)
class SpeedMeasurement:
    """Holds milliseconds of one plan on one card, and what its table had predicted then.

    Attributes:
        target: as ``ModelConfig.source``. format, drafter_precision, kv_cache: of the plan. rows: of a cycle; 1 where
            there is no drafter, and then ``cycle_ms`` is None. shorter: as of ``Times``. basis: of what was predicted.
    """

    card: str
    target: str
    format: str
    drafter_precision: str
    kv_cache: str
    context: int
    rows: int
    step_ms: float
    cycle_ms: float | None
    predicted_step_ms: float | None
    predicted_cycle_ms: float | None
    shorter: tuple[tuple[int, float], ...]
    basis: str

    @classmethod
    def of(
        cls, card: str, target: str, weights: str, load: LoadConfig, times: Times, predicted: Prediction | None
    ) -> SpeedMeasurement:
        """Make that of a load. weights: the format's name. times: measured. predicted: for this context."""
        expected = None if predicted is None else predicted.times[0]
        return cls(
            card=card,
            target=target,
            format=weights,
            drafter_precision=load.drafter_precision,
            kv_cache=load.kv_cache,
            context=times.context,
            rows=int(times.rows),
            step_ms=times.step_ms,
            cycle_ms=times.cycle_ms,
            predicted_step_ms=None if expected is None else expected.step_ms,
            predicted_cycle_ms=None if expected is None else expected.cycle_ms,
            shorter=times.shorter,
            basis="" if predicted is None else predicted.basis,
        )

    def is_of(self, plan: Plan, target: str) -> bool:
        """Return True for a plan of the same target, format, caches and drafter."""
        load = plan.load
        own = self.target, self.format, self.kv_cache, self.rows
        same = own == (target, plan.format, load.kv_cache, plan.block_size or 1)
        return same and load.drafter_precision in ("auto", self.drafter_precision)

    @property
    def _key(self) -> tuple[str, str, str, str, int, int]:
        return self.target, self.format, self.drafter_precision, self.kv_cache, self.rows, self.context


class SpeedRecord:
    """Keeps the measurements of a card; nothing where ``folder`` is None."""

    def __init__(self, folder: Path | None, card: str) -> None:
        self.path = None if folder is None else folder / f"{file_stem(card)}.json"
        self.card = card

    def read(self) -> tuple[SpeedMeasurement, ...]:
        """Read whatever of the file is as it should be."""
        found = read_kept(self.path, lambda entries: [_measurement(entry) for entry in entries])
        return tuple(each for each in found or () if each is not None and each.card == self.card)

    def add(self, measured: Iterable[SpeedMeasurement]) -> None:
        """Keep measurements, in the place of older ones of the same plan and context."""
        if self.path is None:
            return
        entries = {each._key: each for each in self.read()}
        for each in measured:
            entries.pop(each._key, None)
            entries[each._key] = each
        keep(self.path, json.dumps([asdict(each) for each in [*entries.values()][-KEPT:]], indent=1) + "\n")


def corrected(
    found: Prediction | None, plan: Plan, target: str, measured: tuple[SpeedMeasurement, ...]
) -> Prediction | None:
    """Correct a prediction by what this card measured: of the very plan the measured times, else scaled by how far
    other
    plans' predictions were off, the median of them: of those that were made on the same basis.
    """
    own = [each for each in measured if each.is_of(plan, target)]
    if found is None:
        return None
    alike = [each for each in own or measured if each.basis == found.basis]
    if not own and not alike:
        return found
    step = _factor((each.step_ms, each.predicted_step_ms) for each in alike)
    cycle = _factor((each.cycle_ms, each.predicted_cycle_ms) for each in alike)
    times = []
    for one in found.times:
        near = [each for each in own if abs(each.context - one.context) <= NEAR * one.context]
        if near:
            best = min(near, key=lambda each: abs(each.context - one.context))
            times.append(Times(one.context, best.step_ms, best.cycle_ms, best.rows, best.shorter, True, one.prompt_ms))
            continue
        shorter = tuple((rows, ms * cycle) for rows, ms in one.shorter)
        cycle_ms = None if one.cycle_ms is None else one.cycle_ms * cycle
        times.append(replace(one, step_ms=one.step_ms * step, cycle_ms=cycle_ms, shorter=shorter))
    if own:
        contexts = ", ".join(f"{context:,}" for context in sorted({each.context for each in own}))
        rest = f"; other contexts {'scaled by that' if alike else 'predicted'}"
        rest = "" if all(one.measured for one in times) else rest
        basis = f"measured on this card at {contexts} tokens of context{rest}"
    else:
        basis = f"{found.basis}; corrected by {counted(len(alike), 'measurement')} on this card"
    return replace(found, times=tuple(times), basis=basis)


def _factor(pairs: Iterable[tuple[float | None, float | None]]) -> float:
    known = [ms / predicted for ms, predicted in pairs if ms is not None and predicted]
    return median(known) if known else 1.0


def _measurement(entry: Any) -> SpeedMeasurement | None:
    try:
        shorter = dict(entry["shorter"])
        found = SpeedMeasurement(**{**entry, "shorter": tuple(shorter.items())})
    except (KeyError, TypeError, ValueError):
        return None
    texts = found.card, found.target, found.format, found.drafter_precision, found.kv_cache, found.basis
    times = found.cycle_ms, found.predicted_step_ms, found.predicted_cycle_ms
    right = (
        all(isinstance(each, str) for each in texts)
        and all(isinstance(each, int) and each > 0 for each in (found.context, found.rows, *shorter))
        and all(map(_is_time, (found.step_ms, *shorter.values())))
        and all(each is None or _is_time(each) for each in times)
    )
    return found if right else None


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e6
