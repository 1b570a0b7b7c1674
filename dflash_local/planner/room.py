"""What leaves more memory for a context, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dflash_local.load_config import FUSED, LOAD_OPTIONS, LoadConfig
from dflash_local.planner.plan import Plan, plan

if TYPE_CHECKING:
    from dflash_local.planner.recommend import Option

WORTH_SAYING = 4096  # tokens of context that an option must bring to be named


@dataclass(frozen=True, slots=True)
class RoomMaker:
    """Describes a value of an option that leaves more memory for a context.

    Attributes:
        field: of ``LoadConfig``. what: it does, in words. cost: what becomes of the replies.
    """

    field: str
    value: str
    what: str
    cost: str = "the same replies"

    @property
    def option(self) -> str:
        """Write it as on a command line."""
        return " ".join(LOAD_OPTIONS[self.field].arguments(self.value))

    def applied(self, config: LoadConfig) -> LoadConfig:
        change: dict[str, Any] = {self.field: self.value}
        return replace(config, **change)


CODED_KV = RoomMaker("kv_cache", "int8", "keys and values in 8 bits", "which changes replies")
# The harmless first; of one field the later ones leave more.
ROOM_MAKERS = (
    RoomMaker("drafter_precision", "8bit", "drafter and its head in 8 bits"),
    RoomMaker("drafter_precision", "8bit-drafter", "drafter in 8 bits"),
    RoomMaker("offload", "embedding", "embedding in host memory"),
    RoomMaker("offload", "all", "embedding and snapshots in host memory"),
    CODED_KV,
)


@dataclass(frozen=True, slots=True)
class MoreContext:
    """Says which options bring more context, how many tokens, and what they cost."""

    options: str
    tokens: int
    cost: str

    @property
    def line(self) -> str:
        return f"+{self.tokens:,} tokens with {self.options}: {self.cost}"

    @property
    def short_line(self) -> str:
        """Say it with the last cost alone, which is the one that matters."""
        return f"{self.options}: {self.tokens:,} more tokens of context, {self.cost.rpartition(', ')[2]}"


def room_made(load: LoadConfig) -> list[RoomMaker]:
    """Return what a load does to leave more memory for its context."""
    return [each for each in ROOM_MAKERS if getattr(load, each.field) == each.value]


def described(made: Sequence[RoomMaker]) -> str:
    """Say what they do, and what becomes of the replies."""
    return "; ".join(
        f"{' and '.join(each.what for each in of)}, {cost}" for cost, of in groupby(made, attrgetter("cost"))
    )


def longest_context(best: Option) -> int | None:
    """Return the most tokens that the same weights leave with keys and values in 8 bits; None where none do."""
    found = _widest(best, CODED_KV.applied(best.config) if best.plan.engine == FUSED else best.config)
    return found.context if found.fits else None


def more_context(best: Option) -> MoreContext | None:
    """Return what brings ``WORTH_SAYING`` tokens to a plan, by what changes no reply if that does; None where nothing
    does, or where a context was asked for.
    """
    asked, now = best.config, best.plan.context
    if asked.context is not None or now is None or best.plan.engine != FUSED:
        return None
    for config in (asked, CODED_KV.applied(asked)):
        wider = _widest(best, config)
        gained = (wider.context or 0) - now
        if wider.fits and gained >= WORTH_SAYING:
            made = [each for each in room_made(wider.load) if getattr(asked, each.field) != each.value]
            options = " ".join(each.option for each in made)
            return MoreContext(options, gained, described(made))
    return None


def _widest(best: Option, config: LoadConfig) -> Plan:
    return plan(best.weights.target, best.drafter, best.plan.machine, config, wanted=best.limit)
