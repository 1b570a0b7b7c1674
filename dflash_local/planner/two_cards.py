"""Which of a target's layers lie on a second GPU, and what each of the two holds then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from dflash_local.config.features import ModelConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.layout.target import front_model
from dflash_local.planner import fused_memory
from dflash_local.planner.ledger import Ledger, MemoryLine
from dflash_local.planner.load import Load


@dataclass(frozen=True, slots=True)
class CardSplit:
    """Says that the first ``layers`` lie on the second GPU. ``home``: of the first one, with all the rest."""

    layers: int
    home: Ledger
    front: Ledger

    @property
    def needs(self) -> tuple[int, int]:
        """Return the bytes that must be free on each of the two."""
        return self.home.total or 0, self.front.total or 0

    def fullness(self, free: Sequence[int]) -> tuple[float, float]:
        """Return the share of its free bytes that each of the two needs."""
        return self.needs[0] / max(free[0], 1), self.needs[1] / max(free[1], 1)

    def together(self) -> Ledger:
        """Return the lines of both, added up."""
        both = self.home, self.front
        sums: Counter[str] = Counter()
        for line in chain(*(each.lines for each in both)):
            sums[line.name] += line.bytes or 0
        notes = {line.name: line.note for line in chain(self.front.lines, self.home.lines)}
        notes["target weights"] += f"; {self.layers} layers on the second GPU"
        host: Counter[str] = Counter()
        for line in chain(*(each.host for each in both)):
            host[line.name] += line.bytes or 0
        return Ledger(
            tuple(MemoryLine(name, size, notes[name]) for name, size in sums.items()),
            MemoryLine("loading", sum(each.loading.bytes or 0 for each in both), self.home.loading.note),
            MemoryLine("reserve", sum(each.reserve.bytes or 0 for each in both), f"{self.home.reserve.note}, twice"),
            tuple(MemoryLine(name, size) for name, size in host.items()),
            self.needs,
        )


def split_of(target: ModelConfig, drafter: Drafter | None, load: Load, layers: int) -> CardSplit:
    """Return what two GPUs hold where so many layers are on the second one."""
    spec = fused_memory.engine_spec(drafter, load)
    taps = 0 if drafter is None else sum(tap < layers for tap in drafter.taps)
    home, front = _parts(target, layers)
    return CardSplit(
        layers,
        fused_memory.ledger(home, drafter, load),
        fused_memory.ledger(front, None, load, replace(spec, num_taps=taps)),
    )


@lru_cache(maxsize=256)  # a configuration's hash, by which ledgers are kept, takes longer than a ledger
def _parts(target: ModelConfig, layers: int) -> tuple[ModelConfig, ModelConfig]:
    """Return the target of the first GPU and that of the second one, which has the first layers and no embedding."""
    front = replace(front_model(target, layers), vocab_size=1, tie_word_embeddings=True)
    return replace(target, layers=target.layers[layers:], first_layer=layers), front


def even_split(target: ModelConfig, drafter: Drafter | None, load: Load, free: Sequence[int]) -> CardSplit:
    """Return the split that fills both GPUs alike; ``free``: bytes of the first and of the second one."""
    found: dict[int, CardSplit] = {}
    low, high, layers = 0, target.num_layers, target.num_layers // 2  # the more layers, the fuller the second one
    while high - low > 1:
        found[layers] = split_of(target, drafter, load, layers)
        home, front = found[layers].fullness(free)
        low, high = (low, layers) if front >= home else (layers, high)
        moved = front / layers * (1 + free[1] / max(free[0], 1))  # by one layer more, about
        layers = min(max(layers + round((home - front) / moved), low + 1), high - 1)
    return min(found.values(), key=lambda each: max(each.fullness(free)))
