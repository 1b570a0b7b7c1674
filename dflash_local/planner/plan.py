"""From shapes and a machine to a plan: what is loaded how, at which context, and whether it fits.

Never raises for what does not fit (``require`` does); loads nothing, asks nothing of a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.planner import formats
from dflash_local.planner.ledger import GIB, Ledger, Line
from dflash_local.planner.machine import Machine
from dflash_local.planner.memory import Load, kv_bytes_per_token, ledger
from dflash_local.planner.shape import DrafterShape, TargetShape

FLOOR = 2048  # tokens below which a chat is of no use
STEP = 1024  # a context found automatically is a multiple of this
DEFAULT_CONTEXT = 4096  # for a target whose configuration names none, as `engine.load` takes it
LIKELY_BLOCK = 16  # for a drafter whose block size is not known
FORMATS = (None, "int8", "nf4")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for. ``context`` None: the most that fits."""

    dtype: str = "auto"
    quantize: str | None = None
    context: int | None = None
    draft: bool = True
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pair would be run, whether it fits, and why (not).

    Attributes:
        engine: reference, or server for targets no single machine of ours runs.
        context: tokens the session would hold; the floor, or the wish, when it does not fit.
        ledger: sizes in bytes; unknown ones are None, and then nothing is promised.
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

    @property
    def format(self) -> str:
        """The weights' format in one word."""
        return self.quantize or self.dtype

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        names = ("fits", "runs_on", "engine", "dtype", "quantize", "context", "block_size", "draft", "reason")
        return {name: getattr(self, name) for name in names} | {
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
        return " ".join(words)


def plan(
    target: TargetShape,
    drafter: DrafterShape | None,
    machine: Machine,
    wish: Wish | None = None,
    *,
    runs_on: Literal["local", "server"] = "local",
) -> Plan:
    """The plan of this wish on this machine; ``fits`` is False when it does not fit or is not known to.

    Raises:
        UsageError: a wish no machine could grant: a context beyond the models', an unknown format.
    """
    wish = wish or Wish()
    limit = context_limit(target, drafter)
    _check(wish, limit)
    if runs_on == "server":
        return _server_plan(target, machine, limit)
    drafter = drafter if wish.draft else None
    dtype = formats.default_dtype(machine.kind) if wish.dtype == "auto" else wish.dtype
    asked = _Asked(target, drafter, machine, dtype, wish.quantize, _block(drafter, wish))
    refused = formats.refusal(target, wish.quantize)
    if refused:
        return asked.plan(wish.context or limit, refused)
    if wish.context is not None:
        return asked.plan(wish.context)
    return asked.plan(asked.most(limit))


def nearest(
    target: TargetShape, drafter: DrafterShape | None, machine: Machine, wish: Wish | None = None
) -> Plan | None:
    """The plan nearest to the wish that fits: less context, then smaller weights, then no drafter."""
    for other in _nearby(wish or Wish(), machine):
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


def fits_table(target: TargetShape, drafter: DrafterShape | None, machine: Machine) -> tuple[Plan, ...]:
    """Every weight format the reference engine can run, each with the most context that fits."""
    return tuple(plan(target, drafter, machine, Wish(quantize=each)) for each in FORMATS)


def context_limit(target: TargetShape, drafter: DrafterShape | None) -> int:
    """Tokens both models were made for."""
    limits = [target.context or DEFAULT_CONTEXT]
    if drafter is not None and drafter.context is not None:
        limits.append(drafter.context)
    return min(limits)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Everything but the context."""

    target: TargetShape
    drafter: DrafterShape | None
    machine: Machine
    dtype: str
    quantize: str | None
    block: int

    def ledger(self, context: int) -> Ledger:
        device = self.machine.kind if self.machine.kind in ("cpu", "mps") else "cuda"
        load = Load(self.dtype, self.quantize, context, self.block, device)
        return ledger(self.target, self.drafter, load)

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

    def plan(self, context: int, refused: str = "") -> Plan:
        sizes = self.ledger(context)
        fits = not refused and sizes.total is not None and sizes.total <= self.machine.free
        return Plan(
            fits=fits,
            runs_on="local",
            engine="reference",
            dtype=self.dtype,
            quantize=self.quantize,
            context=context,
            block_size=self.block if self.drafter else 1,
            machine=self.machine,
            ledger=sizes,
            reason=refused or self._reason(sizes, context, fits),
            draft=self.drafter is not None,
        )

    def _reason(self, sizes: Ledger, context: int, fits: bool) -> str:
        free, name = _gib(self.machine.free), self.machine.name
        if sizes.total is None:
            unknown = [line.name for line in (*sizes.lines, sizes.loading) if line.bytes is None]
            return f"not known to fit: {', '.join(unknown)} of {self.target.source} cannot be told from its shape"
        if fits:
            return f"needs {_gib(sizes.total)} at context {context}; {free} free on {name}"
        filled = sizes.running == sizes.peak
        need = f"{_gib(sizes.total)} {f'at context {context}' if filled else 'while it loads'}"
        what = f"{self.target.source} in {self.quantize or self.dtype}"
        short = sizes.total - self.machine.free
        return f"{what} needs {need}, {name} has {free} free: {_size(short)} too little"


def _nearby(wish: Wish, machine: Machine) -> Iterator[Wish]:
    """Wishes ever further from this one."""
    ways = [wish.quantize] if wish.quantize else list(FORMATS)
    if wish.quantize == "int8":
        ways.append("nf4")
    for draft in dict.fromkeys((wish.draft, False)):
        for quantize in ways:
            yield replace(wish, quantize=quantize, draft=draft, context=None)
        if machine.kind == "cpu" and wish.dtype in ("auto", "float32"):
            yield replace(wish, dtype="bfloat16", draft=draft, context=None)


def _block(drafter: DrafterShape | None, wish: Wish) -> int:
    if drafter is None:
        return 1
    return drafter.block_size or wish.block_size or LIKELY_BLOCK


def _check(wish: Wish, limit: int) -> None:
    if wish.dtype != "auto" and wish.dtype not in formats.DTYPE_BYTES:
        raise UsageError(f"unknown dtype {wish.dtype!r}", f"use auto, {', '.join(formats.DTYPE_BYTES)}")
    if wish.quantize not in FORMATS:
        raise UsageError(f"unknown quantisation {wish.quantize!r}", "use nf4 or int8")
    if wish.context is not None and not 1 <= wish.context <= limit:
        raise UsageError(f"context {wish.context} is outside 1..{limit}")


def _server_plan(target: TargetShape, machine: Machine, limit: int) -> Plan:
    """A target that only servers run: sizes as published, nothing promised for this machine."""
    published = formats.published_bytes(target)
    each = kv_bytes_per_token(target)
    sizes = Ledger(
        (
            Line("target weights", published, target.native_format or target.stored_dtype),
            Line("target KV", None if each is None else each * limit, f"{limit} tokens"),
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
