"""What leaves more memory for a context, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_local.errors import UsageError
from dflash_local.load_config import FUSED, LOAD_OPTIONS, LoadConfig
from dflash_local.planner.plan import plan

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


# The harmless first; of one field the later ones leave more.
ROOM_MAKERS = (
    RoomMaker("drafter_precision", "8bit", "drafter and its head in 8 bits"),
    RoomMaker("drafter_precision", "8bit-drafter", "drafter in 8 bits"),
    RoomMaker("offload", "embedding", "embedding in host memory"),
    RoomMaker("offload", "all", "embedding and snapshots in host memory"),
    RoomMaker("kv_cache", "fp8", "keys and values in 8 bits", "which changes replies"),
)


@dataclass(frozen=True, slots=True)
class MoreContext:
    """Says which option brings more context, how many tokens, and what it costs."""

    option: str
    tokens: int
    cost: str

    @property
    def line(self) -> str:
        return f"+{self.tokens:,} tokens with {self.option}: {self.cost}"


def room_made(load: LoadConfig) -> list[RoomMaker]:
    """Return what a load does to leave more memory for its context."""
    return [each for each in ROOM_MAKERS if getattr(load, each.field) == each.value]


def longest_context(best: Option) -> int | None:
    """Return the most tokens that the same weights leave with keys and values in 8 bits; None where none do."""
    config = replace(best.config, kv_cache="fp8") if best.plan.engine == FUSED else best.config
    found = plan(best.weights.target, best.drafter, best.plan.machine, config, wanted=best.limit)
    return found.context if found.fits else None


def more_context(best: Option) -> MoreContext | None:
    """Return the first of ``ROOM_MAKERS`` that brings ``WORTH_SAYING`` tokens to a plan; None where none does, or where
    a context was asked for.
    """
    asked, now = best.config, best.plan.context
    if asked.context is not None or now is None or best.plan.engine != FUSED:
        return None
    for each in ROOM_MAKERS:
        if getattr(asked, each.field) != getattr(LoadConfig(), each.field):
            continue
        try:
            wider = plan(best.weights.target, best.drafter, best.plan.machine, each.applied(asked))
        except UsageError:  # an option that these models cannot have
            continue
        gained = (wider.context or 0) - now
        if wider.fits and gained >= WORTH_SAYING:
            return MoreContext(each.option, gained, f"{each.what}, {each.cost}")
    return None
