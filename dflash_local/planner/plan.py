"""From shapes and a machine to a plan: what is loaded how, at which context, and whether it fits.

Never raises for what does not fit (``require`` does); loads nothing, uses no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Literal

from dflash_local.catalog import engine_rule
from dflash_local.config.features import ModelConfig
from dflash_local.config.fused_support import fused_refusal
from dflash_local.config.quantization import kept_format
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.with_mtp import drafters_of
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.layout.cycle import LARGER_CHUNKS, SNAPSHOT_EVERY, prompt_chunk
from dflash_local.layout.quantized import quantize_refusal, quantized
from dflash_local.load_config import BITSANDBYTES, LOAD_OPTIONS, OFFLOADS, QUANTIZED, LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.planner import formats, fused_memory, memory
from dflash_local.planner.ledger import GIB, Ledger, MemoryLine
from dflash_local.planner.load import Load
from dflash_local.planner.machine import Machine
from dflash_local.planner.memory import kv_bytes_per_token
from dflash_local.planner.two_cards import even_split

FLOOR = 2048  # tokens below which a chat is of no use
USABLE = 8192  # tokens that a chat needs
ROOMY = 32_768  # tokens that are wanted where none are requested: what changes no reply makes room for them
STEP = 1024  # a context found automatically is a multiple of this
DEFAULT_CONTEXT = 4096  # for a target whose configuration names none, as `engine.load` takes it
FORMATS = (None, *LOAD_OPTIONS["quantize"].choices)
SMALLER = ("int8", "int4", *BITSANDBYTES)  # fp8 takes what int8 takes, and rounds coarser
COARSER = ("8bit", "8bit-drafter")  # drafter precisions that auto takes for want of memory: ever less, all ids drafted


@dataclass(frozen=True, slots=True)
class Plan:
    """Says how a pair would be run, whether it fits, and why (not).

    Attributes:
        engine: fused or reference, or server for targets no single machine of ours runs. dtype: of the weights, or of
            what is computed with them. stored: the format that an engine keeps them in as they are published; None
            for plain or decoded ones.
        load: what loads it so: the requested one with the context, the drafter precision, the offload and the chunk of
            a prompt of the plan. The context is the floor, or the requested one, when it does not fit.
        ledger: sizes in bytes; those of a server's target may be unknown.
        slow: why it is the reference engine, where the fused one would run the target without a drafter; else empty.
    """

    fits: bool
    runs_on: Literal["local", "server"]
    engine: str
    dtype: str
    load: LoadConfig
    block_size: int | None
    machine: Machine
    ledger: Ledger
    reason: str
    stored: str | None = None
    slow: str = ""

    @property
    def context(self) -> int | None:
        """Return tokens the session would hold."""
        return self.load.context

    @property
    def format(self) -> str:
        """Name the weights' format in one word."""
        return self.load.quantize or self.stored or self.dtype

    @property
    def lacking(self) -> int:
        """Return the bytes that it needs beyond what is free; 0 where it has room, or its need is not known."""
        return self.ledger.lacking(self.machine.free, self.machine.free_of_cards) or 0

    @property
    def crowded(self) -> str:
        """Say that it needs more of the main memory than is free at the moment; nothing where it does not."""
        now, total = self.machine.free_now, self.ledger.total
        if now is None or not self.fits or total is None or total <= now:
            return ""
        return f"needs {_gib(total)}, and {_gib(now)} of main memory is free right now: close other programs first"

    def as_dict(self) -> dict[str, Any]:
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "load"}
        made = {"machine": self.machine.as_dict(), "ledger": self.ledger.as_dict(), "format": self.format}
        return {**asdict(self.load), **own, **made}

    def options(self) -> str:
        """Write the command-line options that ask for this plan; a chunk that it chose is chosen again."""
        chosen = self.load.prefill_chunk in LARGER_CHUNKS
        return " ".join((replace(self.load, prefill_chunk=None) if chosen else self.load).arguments())


def plan(
    target: ModelConfig,
    drafter: Drafter | None,
    machine: Machine,
    config: LoadConfig | None = None,
    *,
    runs_on: Literal["local", "server"] = "local",
    wanted: int = ROOMY,
) -> Plan:
    """Plan a load on this machine; ``fits`` is False when it does not fit or is not known to.

    Of the automatic drafter precision a coarser one is taken where only that fits, or only it leaves the context that
    is wanted; then of the automatic offload the first that does. What is left then is for larger chunks of a prompt.

    Args:
        wanted: tokens of context, where none are requested.

    Raises:
        UsageError: what no machine could do: a context beyond the models', an engine that cannot run this.
    """
    config = config or LoadConfig()
    limit = context_limit(target, drafter)
    if config.context is not None and config.context > limit:
        raise UsageError(f"context {config.context} is outside 1..{limit}")
    if runs_on == "server":
        return _server_plan(target, machine, limit)
    drafter = drafters_of(target, drafter, config)
    engine = chosen_engine(target, drafter, machine, config)
    if engine == "fused" and len(machine.cards) > 2:
        machine = machine.two_of_them()
    refused = formats.refusal(target, config.quantize)
    case = _Case(quantized(target, config.quantize), drafter, machine, config, engine)
    if refused:
        return case.plan(config.context or limit, refused)
    return case.best(limit, config.context or min(wanted, limit))


def nearest(
    target: ModelConfig, drafter: Drafter | None, machine: Machine, config: LoadConfig | None = None
) -> Plan | None:
    """Find the nearest plan that fits: less context, then another drafter precision, the drafter without the target's
    own layer, smaller weights, no drafter.

    Of a format that the target cannot be rounded to, the nearest to the target as it is.
    """
    config = config or LoadConfig()
    if quantize_refusal(target, config.quantize):
        config = replace(config, quantize=None)
    for other in alternatives(config, machine):
        result = plan(target, drafter, machine, other)
        if result.fits:
            return result
    return None


def require(result: Plan, other: Plan | None) -> None:
    """Pass when the plan fits.

    Raises:
        DoesNotFitError: exit 5, with what is needed, what is there, and what would fit.
    """
    if result.fits:
        return
    if other is None:
        hint = "no smaller context or format of it fits here; dflash show MODEL --gpu-memory G tries another machine"
    else:
        room = f"{_gib(other.machine.free)} {other.machine.room}"
        hint = f"this fits: {other.options()} ({_gib(other.ledger.total)} of {room})"
    raise DoesNotFitError(result.reason, hint)


def fits_table(
    target: ModelConfig, drafter: Drafter | None, machine: Machine, config: LoadConfig | None = None
) -> tuple[Plan, ...]:
    """Plan every format of weights that the target may have, each with the most context that fits."""
    config = replace(config or LoadConfig(), dtype="auto", context=None)
    taken = [each for each in formats_of(config) if not quantize_refusal(target, each)]
    return tuple(plan(target, drafter, machine, replace(config, quantize=each)) for each in taken)


def chosen_engine(target: ModelConfig, drafter: Drafter | None, machine: Machine, config: LoadConfig) -> str:
    """Choose ``fused`` or ``reference``, as loading would.

    Raises:
        UsageError: an engine was requested that cannot run this.
    """
    why = engine_rule.refusal(
        bitsandbytes=config.bitsandbytes,
        dtype=formats.resolved_dtype(config.dtype, machine.kind),
        device=machine.kind,
        target=fused_refusal(target),
        experts=not target.dense,
        drafter="" if drafter is None else drafter.fused_refusal(),
    )
    fused = engine_rule.fused(why, lambda: machine.runs_kernels(target.dense), config.needs_fused)
    return engine_rule.choose(config.engine, (fused, engine_rule.reference(config.needs_fused)))


def context_limit(target: ModelConfig, drafter: Drafter | None) -> int:
    """Return tokens both models were made for."""
    limits = [target.max_position_embeddings or DEFAULT_CONTEXT]
    if drafter is not None and drafter.max_position_embeddings is not None:
        limits.append(drafter.max_position_embeddings)
    return min(limits)


def held(target: ModelConfig, drafter: Drafter | None, facts: SessionFacts) -> int:
    """Return the bytes of its device that a loaded pair holds from its load to its end.

    What a reply takes besides is left out: between replies it may be free already.

    Args:
        target, drafter: what was loaded. facts: how it was loaded.
    """
    load = Load.of(facts.device, facts.load, facts.context, facts.block_size)
    drafter = drafters_of(target, drafter if facts.drafter is not None else None, facts.load)
    return _ledger(facts.engine, quantized(target, facts.load.quantize), drafter, load).loading.bytes or 0


def _ledger(engine: str, target: ModelConfig, drafter: Drafter | None, load: Load) -> Ledger:
    return (fused_memory.ledger if engine == "fused" else memory.ledger)(target, drafter, load)


@dataclass(frozen=True, slots=True)
class _Case:
    """Holds everything but the context."""

    target: ModelConfig
    drafter: Drafter | None
    machine: Machine
    config: LoadConfig
    engine: str

    @property
    def block(self) -> int:
        return 1 if self.drafter is None else self.drafter.block_size

    @property
    def dtype(self) -> str:
        if self.config.dtype == "auto" and self.machine.kind == "cpu":
            return formats.cpu_dtype(self.target, self.config.bitsandbytes, self.machine.bfloat16)
        return formats.resolved_dtype(self.config.dtype, self.machine.kind)

    @property
    def stored(self) -> str | None:
        return kept_format(self.target.quantization, self.engine)

    def ledger(self, context: int) -> Ledger:
        load = Load.of(self.machine.kind, replace(self.config, dtype=self.dtype), context, self.block)
        if self.engine == "fused" and len(self.machine.cards) == 2:
            return even_split(self.target, self.drafter, load, self.machine.free_of_cards).together()
        return _ledger(self.engine, self.target, self.drafter, load)

    def fits(self, context: int) -> bool:
        return self.ledger(context).lacking(self.machine.free, self.machine.free_of_cards) == 0

    def most(self, limit: int) -> int:
        """Return the largest context that fits, a multiple of ``STEP`` or the limit itself; the floor if none does."""
        if limit <= FLOOR or not self.fits(FLOOR):
            return min(limit, FLOOR)
        if self.fits(limit):
            return limit
        low, high = FLOOR // STEP, (limit - 1) // STEP  # low fits, high + 1 does not
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle * STEP) else (low, middle - 1)
        return low * STEP

    def best(self, limit: int, wanted: int) -> Plan:
        """Plan the first offload and drafter precision with enough context; else those that leave the most of it. Then
        the largest chunk of a prompt for which that has room.
        """
        found = self._with_context(limit, wanted)
        for chunk in self._larger_chunks(found):
            other = replace(self, config=replace(found.load, prefill_chunk=chunk)).plan(found.context or 0)
            if other.fits:
                return other
        return found

    def _larger_chunks(self, found: Plan) -> list[int]:
        """List larger chunks than the model's own. In exact mode the bits must not depend on what memory is free."""
        given = self.config.prefill_chunk is not None or self.config.exact
        if not found.fits or given or self.engine != "fused" or self.machine.kind not in ("cuda", "named"):
            return []
        context = found.context or 0
        most = min(context, SNAPSHOT_EVERY) if self.target.takes_snapshots else context
        return [chunk for chunk in LARGER_CHUNKS if prompt_chunk(self.target, context) < chunk <= most]

    def _with_context(self, limit: int, wanted: int) -> Plan:
        asked, fitting = self.config.context, list[Plan]()
        drafting = self.engine == "fused" and self.drafter is not None
        coarser = COARSER if drafting and self.config.drafter_precision == "auto" else ()
        cases = [
            replace(case, config=replace(case.config, drafter_precision=precision))
            for case in self._offloaded()
            for precision in (self.config.drafter_precision, *coarser)
        ]
        if not replace(cases[-1], drafter=None).fits(asked or min(limit, FLOOR)):
            del cases[:-1]  # with the most offloaded not even the target has room
        for case in cases:
            found = case.plan(asked or case.most(limit))
            if found.fits and (found.context or 0) >= wanted:
                return found
            if found.fits:
                fitting.append(found)
        return max(fitting, key=lambda each: each.context or 0, default=found)

    def _offloaded(self) -> list[_Case]:
        """List this case, and of the automatic offload those that leave less on a GPU that has such things."""
        if self.engine != "fused" or self.config.offload != "auto" or self.machine.kind not in ("cuda", "named"):
            return [self]
        has = {"snapshots": self.target.recurrent, "embedding": not self.target.tie_word_embeddings}
        names = [name for name, parts in OFFLOADS.items() if parts and has[parts[-1]]]
        return [self, *(replace(self, config=replace(self.config, offload=name)) for name in names)]

    def plan(self, context: int, refused: str = "") -> Plan:
        sizes = self.ledger(context)
        fits = not refused and sizes.lacking(self.machine.free, self.machine.free_of_cards) == 0
        return Plan(
            fits=fits,
            runs_on="local",
            engine=self.engine,
            dtype=self.dtype,
            load=replace(self.config, context=context, draft=self.drafter is not None),
            block_size=self.block,
            machine=self.machine,
            ledger=sizes,
            reason=refused or self._reason(sizes, context, fits),
            stored=self.stored,
            slow=self._slow(),
        )

    def _slow(self) -> str:
        why = "" if self.drafter is None else self.drafter.fused_refusal()
        if not why or self.config.engine != "auto":
            return ""
        config = self.config if self.config.bitsandbytes is None else replace(self.config, quantize=None)
        return why if chosen_engine(self.target, None, self.machine, config) == "fused" else ""

    def _reason(self, sizes: Ledger, context: int, fits: bool) -> str:
        free, name = f"{_gib(self.machine.free)} {self.machine.room}", self.machine.name
        if fits:
            host = "".join(f"; {line.name} in host memory, {_size(line.bytes or 0)}" for line in sizes.moved)
            return f"needs {_gib(sizes.total)} at context {context}; {free} on {name}{host}"
        total = sizes.total or 0
        filled = sizes.running == sizes.peak
        need = f"{_gib(total)} {f'at context {context}' if filled else 'while it loads'}"
        what = f"{self.target.source} in {self.config.quantize or self.stored or self.dtype}"
        short = f"{_size(sizes.lacking(self.machine.free, self.machine.free_of_cards) or 0)} too little"
        cards = [
            f"{_gib(size)} on {card.device if card.kind == 'cuda' and card.device != 'auto' else card.name}, which has "
            f"{_gib(card.free)} free"
            for size, card in zip(sizes.cards, self.machine.cards, strict=False)
            if size > card.free
        ]
        if cards:
            return f"{what} needs {need}, of that {' and '.join(cards)}: {short}"
        return f"{what} needs {need}, {name} has {free}: {short}"


def _server_plan(target: ModelConfig, machine: Machine, limit: int) -> Plan:
    """Plan a target that only servers run: sizes as published, nothing promised for this machine."""
    published = formats.published_bytes(target)
    sizes = Ledger(
        (
            MemoryLine(
                "target weights", published, target.quantization.name if target.quantization else target.stored_dtype
            ),
            MemoryLine("target KV", kv_bytes_per_token(target) * limit, f"{limit} tokens"),
        ),
        MemoryLine("loading", 0),
    )
    weights = f"{_gib(published)} of weights" if published else "weights of unknown size"
    return Plan(
        fits=False,
        runs_on="server",
        engine="server",
        dtype=target.stored_dtype,
        load=LoadConfig(context=limit),
        block_size=None,
        machine=machine,
        ledger=sizes,
        reason=f"{target.source} runs on a server only: {weights}",
    )


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


def _size(count: int) -> str:
    return _gib(count) if count >= GIB // 10 else f"{max(1, round(count / 2**20))} MiB"


def formats_of(config: LoadConfig) -> tuple[str | None, ...]:
    """Return the weight formats that the configuration's engine can have at all."""
    return (None, *QUANTIZED) if config.needs_fused or config.engine == "fused" else FORMATS


def alternatives(config: LoadConfig, machine: Machine) -> Iterator[LoadConfig]:
    """Yield configurations ever further from this one."""
    smaller = [each for each in SMALLER if each in formats_of(config)]
    if config.quantize:
        smaller = smaller[smaller.index("int4") :]
    tried = dict.fromkeys((config.quantize, *smaller))
    for draft in dict.fromkeys((config.draft, False)):
        layers = dict.fromkeys((config.mtp and draft, False))
        for quantize, mtp in product(tried, layers):
            other = replace(config, quantize=quantize, draft=draft, mtp=mtp, context=None)
            yield other
            if draft and config.drafter_precision != "auto":
                yield replace(other, drafter_precision="auto")
        if machine.kind == "cpu" and config.dtype in ("auto", "float32"):
            for mtp in layers:
                yield replace(config, dtype="bfloat16", draft=draft, mtp=mtp, context=None)
