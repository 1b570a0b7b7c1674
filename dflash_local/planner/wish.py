"""What a user asks of a plan, what may be asked at all, and what lies near it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash_local.catalog import engine_rule
from dflash_local.errors import UsageError
from dflash_local.planner import formats
from dflash_local.planner.machine import Machine

FORMATS = (None, "int8", "nf4")
COARSER = ("8bit", "8bit-drafter")  # draft sides that auto takes for want of memory: ever less, all ids drafted


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for. ``context`` None: the most that fits. ``exact``: the fused engine's mode."""

    dtype: str = "auto"
    quantize: str | None = None
    context: int | None = None
    draft: bool = True
    block_size: int | None = None
    engine: str = "auto"
    exact: bool = False
    draft_side: str = "auto"
    kv_cache: str = "auto"

    @property
    def fused_only(self) -> str:
        """See ``catalog.engine_rule.fused_only``."""
        return engine_rule.fused_only(self.exact, self.kv_cache)


def formats_of(wish: Wish) -> tuple[str | None, ...]:
    """The weight formats that the wish's engine can have at all."""
    return (None,) if wish.fused_only or wish.engine == "fused" else FORMATS


def check(wish: Wish, limit: int) -> None:
    if wish.dtype != "auto" and wish.dtype not in formats.DTYPE_BYTES:
        raise UsageError(f"unknown dtype {wish.dtype!r}", f"use auto, {', '.join(formats.DTYPE_BYTES)}")
    if wish.quantize not in FORMATS:
        raise UsageError(f"unknown quantisation {wish.quantize!r}", "use nf4 or int8")
    if wish.context is not None and not 1 <= wish.context <= limit:
        raise UsageError(f"context {wish.context} is outside 1..{limit}")


def nearby(wish: Wish, machine: Machine) -> Iterator[Wish]:
    """Wishes ever further from this one."""
    ways = [wish.quantize] if wish.quantize else list(formats_of(wish))
    if wish.quantize == "int8":
        ways.append("nf4")
    for draft in dict.fromkeys((wish.draft, False)):
        for quantize in ways:
            yield replace(wish, quantize=quantize, draft=draft, context=None)
            if draft and wish.draft_side != "auto":
                yield replace(wish, quantize=quantize, draft_side="auto", context=None)
        if machine.kind == "cpu" and wish.dtype in ("auto", "float32"):
            yield replace(wish, dtype="bfloat16", draft=draft, context=None)
