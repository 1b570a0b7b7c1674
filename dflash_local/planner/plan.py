"""From shapes and a machine to a plan: what is loaded how, at which context, and whether it fits.

Never raises for what does not fit (``require`` does); loads nothing, asks nothing of a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_local.catalog import engine_rule
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import ModelConfig
from dflash_local.config.fused_support import fused_refusal
from dflash_local.errors import DoesNotFitError
from dflash_local.planner import formats, fused_memory, memory
from dflash_local.planner.ledger import GIB, Ledger, Line
from dflash_local.planner.load import Load
from dflash_local.planner.machine import Machine
from dflash_local.planner.memory import kv_bytes_per_token
from dflash_local.planner.wish import COARSER, Wish, check, formats_of, nearby

FLOOR = 2048  # tokens below which a chat is of no use
USABLE = 8192  # tokens that a coarser draft side may make room for, where no context is asked for
STEP = 1024  # a context found automatically is a multiple of this
DEFAULT_CONTEXT = 4096  # for a target whose configuration names none, as `engine.load` takes it


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pair would be run, whether it fits, and why (not).

    Attributes:
        engine: fused or reference, or server for targets no single machine of ours runs. engine_asked_for: it was
            not left to the rule. exact, draft_side, kv_cache: what the fused engine is told.
        context: tokens the session would hold; the floor, or the wish, when it does not fit.
        ledger: sizes in bytes; those of a server's target may be unknown.
    """

    fits: bool
    runs_on: Literal["local", "server"]
    engine: str
    dtype: str
    quantize: str | None
    context: int | None
    block_size: int | None
    machine: Machine
    ledger: Ledger
    reason: str
    draft: bool = True
    engine_asked_for: bool = False
    exact: bool = False
    draft_side: str = "auto"
    kv_cache: str = "auto"

    @property
    def format(self) -> str:
        """The weights' format in one word."""
        return self.quantize or self.dtype

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        names = ("fits", "runs_on", "engine", "dtype", "quantize", "context", "block_size", "draft", "reason")
        return {name: getattr(self, name) for name in names} | {
            "exact": self.exact,
            "draft_side": self.draft_side,
            "kv_cache": self.kv_cache,
            "machine": self.machine.as_dict(),
            "ledger": self.ledger.as_dict(),
        }

    def options(self) -> str:
        """The command-line options that ask for this plan."""
        words = [f"--context {self.context}"]
        if self.quantize:
            words.append(f"--quantize {self.quantize}")
        elif self.dtype != formats.default_dtype(self.machine.kind):
            words.append(f"--dtype {self.dtype}")
        if not self.draft:
            words.append("--mode ar")
        if self.engine_asked_for:
            words.append(f"--engine {self.engine}")
        if self.exact:
            words.append("--exact")
        if self.draft_side != "auto":
            words.append(f"--draft-side {self.draft_side}")
        if self.kv_cache != "auto":
            words.append(f"--kv-cache {self.kv_cache}")
        return " ".join(words)


def plan(
    target: ModelConfig,
    drafter: DrafterConfig | None,
    machine: Machine,
    wish: Wish | None = None,
    *,
    runs_on: Literal["local", "server"] = "local",
) -> Plan:
    """The plan of this wish on this machine; ``fits`` is False when it does not fit or is not known to.

    Of the automatic draft side a coarser one is taken where only that fits, or only it leaves a usable context.

    Raises:
        UsageError: a wish no machine could grant: a context beyond the models', an unknown format, an engine that
            cannot run this.
    """
    wish = wish or Wish()
    limit = context_limit(target, drafter)
    check(wish, limit)
    if runs_on == "server":
        return _server_plan(target, machine, limit)
    drafter = drafter if wish.draft else None
    dtype = formats.default_dtype(machine.kind) if wish.dtype == "auto" else wish.dtype
    engine = chosen_engine(target, drafter, machine, wish, dtype)
    asked = _Asked(target, drafter, machine, dtype, wish, engine, drafter.block_size if drafter is not None else 1)
    refused = formats.refusal(target, wish.quantize)
    if refused:
        return asked.plan(wish.context or limit, refused)
    found = asked.plan(wish.context or asked.most(limit))
    if engine == "fused" and drafter is not None and wish.draft_side == "auto":
        return asked.with_enough(found, wish.context or min(USABLE, limit))
    return found


def nearest(
    target: ModelConfig, drafter: DrafterConfig | None, machine: Machine, wish: Wish | None = None
) -> Plan | None:
    """The plan nearest to the wish that fits: less context, then another draft side, smaller weights, no drafter."""
    for other in nearby(wish or Wish(), machine):
        found = plan(target, drafter, machine, other)
        if found.fits:
            return found
    return None


def require(found: Plan, near: Plan | None) -> None:
    """Pass when the plan fits.

    Raises:
        DoesNotFitError: exit 5, with what is needed, what is there, and what would fit.
    """
    if found.fits:
        return
    if near is None:
        hint = "no smaller context or format of it fits here; dflash show MODEL --gpu-memory G tries another machine"
    else:
        hint = f"this fits: {near.options()} ({_gib(near.ledger.total)} of {_gib(near.machine.free)} free)"
    raise DoesNotFitError(found.reason, hint)


def fits_table(
    target: ModelConfig, drafter: DrafterConfig | None, machine: Machine, wish: Wish | None = None
) -> tuple[Plan, ...]:
    """Every weight format an engine can run, each with the most context that fits; of the wish its engine counts."""
    wish = wish or Wish()
    asked = Wish(engine=wish.engine, exact=wish.exact, draft_side=wish.draft_side, kv_cache=wish.kv_cache)
    return tuple(plan(target, drafter, machine, replace(asked, quantize=each)) for each in formats_of(asked))


def chosen_engine(target: ModelConfig, drafter: DrafterConfig | None, machine: Machine, wish: Wish, dtype: str) -> str:
    """``fused`` or ``reference``, as loading would choose.

    Raises:
        UsageError: an engine was asked for that cannot run this.
    """
    why = engine_rule.refusal(
        quantize=wish.quantize,
        dtype=dtype,
        device=machine.device if machine.kind == "cuda" else machine.kind,
        drafter_biased=drafter is not None and drafter.attention_bias,
        target=fused_refusal(target),
    )
    return engine_rule.choose(wish.engine, why, lambda: machine.runs_kernels, wish.fused_only)


def context_limit(target: ModelConfig, drafter: DrafterConfig | None) -> int:
    """Tokens both models were made for."""
    limits = [target.max_position_embeddings or DEFAULT_CONTEXT]
    if drafter is not None and drafter.max_position_embeddings is not None:
        limits.append(drafter.max_position_embeddings)
    return min(limits)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Everything but the context."""

    target: ModelConfig
    drafter: DrafterConfig | None
    machine: Machine
    dtype: str
    wish: Wish
    engine: str
    block: int

    def ledger(self, context: int) -> Ledger:
        device = self.machine.kind if self.machine.kind in ("cpu", "mps") else "cuda"
        wish = self.wish
        load = Load(
            self.dtype,
            wish.quantize,
            context,
            self.block,
            device,
            exact=wish.exact,
            draft_side=wish.draft_side,
            narrow_kv=wish.kv_cache == "fp8",
        )
        made = fused_memory.ledger if self.engine == "fused" else memory.ledger
        return made(self.target, self.drafter, load)

    def fits(self, context: int) -> bool:
        need = self.ledger(context).total
        return need is not None and need <= self.machine.free

    def most(self, limit: int) -> int:
        """The largest context that fits, a multiple of ``STEP`` or the limit itself; the floor if none does."""
        if limit <= FLOOR or self.fits(limit):
            return limit
        low, high = FLOOR // STEP, (limit - 1) // STEP  # low may not fit, high + 1 does not
        if not self.fits(low * STEP):
            return FLOOR
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle * STEP) else (low, middle - 1)
        return low * STEP

    def with_enough(self, found: Plan, context: int) -> Plan:
        """The plan itself if it fits with so much context, else that of the draft side which comes nearest to it."""
        plans = [found]
        if not found.fits or (found.context or 0) < context:
            coarser = (replace(self, wish=replace(self.wish, draft_side=side)) for side in COARSER)
            plans += [side.plan(side.most(context)) for side in coarser]
        fitting = [each for each in plans if each.fits and (self.wish.context is None or each.context == context)]
        return max(fitting, key=lambda each: each.context or 0, default=found)

    def plan(self, context: int, refused: str = "") -> Plan:
        sizes = self.ledger(context)
        fits = not refused and sizes.total is not None and sizes.total <= self.machine.free
        return Plan(
            fits=fits,
            runs_on="local",
            engine=self.engine,
            dtype=self.dtype,
            quantize=self.wish.quantize,
            context=context,
            block_size=self.block if self.drafter else 1,
            machine=self.machine,
            ledger=sizes,
            reason=refused or self._reason(sizes, context, fits),
            draft=self.drafter is not None,
            engine_asked_for=self.wish.engine != "auto",
            exact=self.wish.exact,
            draft_side=self.wish.draft_side if self.drafter is not None and self.engine == "fused" else "auto",
            kv_cache=self.wish.kv_cache,
        )

    def _reason(self, sizes: Ledger, context: int, fits: bool) -> str:
        free, name = _gib(self.machine.free), self.machine.name
        if fits:
            return f"needs {_gib(sizes.total)} at context {context}; {free} free on {name}"
        total = sizes.total or 0
        filled = sizes.running == sizes.peak
        need = f"{_gib(total)} {f'at context {context}' if filled else 'while it loads'}"
        what = f"{self.target.source} in {self.wish.quantize or self.dtype}"
        short = total - self.machine.free
        return f"{what} needs {need}, {name} has {free} free: {_size(short)} too little"


def _server_plan(target: ModelConfig, machine: Machine, limit: int) -> Plan:
    """A target that only servers run: sizes as published, nothing promised for this machine."""
    published = formats.published_bytes(target)
    sizes = Ledger(
        (
            Line("target weights", published, formats.native_format(target) or target.stored_dtype),
            Line("target KV", kv_bytes_per_token(target) * limit, f"{limit} tokens"),
        ),
        Line("loading", 0),
    )
    weights = f"{_gib(published)} of weights" if published else "weights of unknown size"
    return Plan(
        fits=False,
        runs_on="server",
        engine="server",
        dtype=target.stored_dtype,
        quantize=None,
        context=limit,
        block_size=None,
        machine=machine,
        ledger=sizes,
        reason=f"{target.source} runs on a server only: {weights}",
    )


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{max(1, round(count / 2**20))} MiB"
