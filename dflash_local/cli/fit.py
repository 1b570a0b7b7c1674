"""Asks the planner about a choice and puts its answers into words: ledger, table, verdict.

Shapes come from the files when they are here, else from the registry. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.checkpoint_files.model_config import read_model_config
from dflash_local.cli.tables import GIB, UNKNOWN, Column, amount, table, tokens, wrapped
from dflash_local.errors import CheckpointError, DoesNotFitError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import BASICS

if TYPE_CHECKING:
    from dflash_local.catalog.bundled import Pair
    from dflash_local.catalog.row import Repo, Row, Variant
    from dflash_local.cli.places import Places
    from dflash_local.cli.resolve import Choice
    from dflash_local.config.drafter_config import DrafterConfig
    from dflash_local.config.features import ModelConfig
    from dflash_local.loaded import SessionFacts
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.settings import Settings

Config = TypeVar("Config")
ROOMY = 32_768  # tokens of context, for which a pre-quantised target may have fewer bits than would fit with less
TARGET_LINES = ("target weights", "head", "embedding")  # of a ledger: what the target's files hold, wherever it lies


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a pair. ``drafter`` is None when there is none, or nothing is known of it."""

    target: ModelConfig
    drafter: DrafterConfig | None
    drafter_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pair that is in memory, and how it was loaded."""

    pair: Pair
    facts: SessionFacts


def machine(
    user: Settings,
    gpu: str | None = None,
    memory_gib: float | None = None,
    device: str = "auto",
    loaded: Loaded | None = None,
) -> Machine:
    """The machine named by the options, else this one.

    Args:
        loaded: what this process has loaded and would give back for another pair: it counts as free.

    Raises:
        UsageError: no such card, not a size, or a device that is not there.
    """
    from dflash_local.planner.machine import named, this_machine

    if gpu is not None or memory_gib is not None:
        return named(gpu, memory_gib)
    return this_machine(device, user.environ, given_back=_given_back(loaded) if loaded is not None else None)


def _given_back(loaded: Loaded) -> dict[str, int]:
    """Bytes by device that unloading a pair frees; nothing for one that another process holds."""
    from dflash_local.planner.held import held
    from dflash_local.remote.attached import AttachedFacts

    pair, facts = loaded.pair, loaded.facts
    if isinstance(facts, AttachedFacts) or facts.device == "balanced":
        return {}
    known = folder_shapes(pair.name, pair.target, pair.drafter if facts.drafter is not None else None)
    if known is None:
        return {}
    device = "cuda:0" if facts.device == "cuda" else facts.device
    return {device: held(known.target, known.drafter, facts)}


def shapes(choice: Choice, places: Places | None) -> Shapes | None:
    """What is known of both shapes; None when not even that of the target is.

    Raises:
        CheckpointError: the config.json of a folder that was named is missing, damaged or of another architecture.
    """
    try:
        return _shapes(choice, places)
    except CheckpointError:
        if places is None or isinstance(choice.target, Path) or isinstance(choice.drafter, Path):
            raise
        return _shapes(choice, None)  # a download that is damaged, which loading will tell better


def _shapes(choice: Choice, places: Places | None) -> Shapes | None:
    from dflash_local.config.drafter_config import DrafterConfig
    from dflash_local.config.read_model import read_model

    config = configuration(choice.target, None, places) or _of_variant(choice)
    name = choice.name if choice.target is None or isinstance(choice.target, Path) else choice.target.id
    target = None if config is None else _known(read_model, config, name)
    if target is None:
        return None
    if choice.drafter is None:
        return Shapes(target, None)
    row = choice.row if choice.own_drafter else None
    readable = row is None or row.kind == "dflash"  # of its relatives nothing here knows what they take
    config = configuration(choice.drafter, row, places) if readable else None
    source = str(choice.drafter) if isinstance(choice.drafter, Path) else choice.drafter.id
    drafter = None if config is None else _known(DrafterConfig.from_shape, config, source)
    return Shapes(target, drafter, drafter_unknown=drafter is None)


def _of_variant(choice: Choice) -> Mapping[str, Any] | None:
    """The configuration of a pre-quantised target by its row; None where the registry does not know the recipe."""
    from dflash_local.catalog.shapes import shape
    from dflash_local.catalog.variant_config import quantization_config

    row = choice.row
    if row is None or row.target is None or choice.target is None or isinstance(choice.target, Path):
        return None
    variant = row.variant(choice.target.id)
    plain, stored = shape(row.target.id), None if variant is None else quantization_config(variant)
    return None if plain is None or stored is None else {**plain, "quantization_config": stored}


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """A pre-quantised target of a row, and its plan; None where its recipe is not known before it is here."""

    variant: Variant
    plan: Plan | None

    @property
    def fits(self) -> bool:
        """True when it is known to."""
        return self.plan is not None and self.plan.fits

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        found = None if self.plan is None else as_json(self.plan)
        return {"name": self.variant.name, "repo": self.variant.repo, "fits": self.fits, "plan": found}


def variant_plans(
    row: Row | None, known: Shapes, where: Machine, load: LoadConfig | None = None, places: Places | None = None
) -> tuple[VariantPlan, ...]:
    """A plan for each pre-quantised target that the registry lists beside a row's own target.

    Args:
        known: of the row's own target; its drafter is every variant's. load: what is asked for; a variant brings its
            own weight format.
    """
    from dflash_local.catalog.row import Repo
    from dflash_local.cli.resolve import Choice
    from dflash_local.errors import UsageError
    from dflash_local.planner.plan import plan

    load = replace(load or LoadConfig(), quantize=None)
    found = []
    for variant in row.variants if row is not None else ():
        choice = Choice(variant.repo, Repo(variant.repo, variant.revision), None, row)
        own = shapes(choice, places)
        try:
            made = None if own is None else plan(own.target, known.drafter, where, load)
        except UsageError:  # an option that this target cannot have
            made = None
        found.append(VariantPlan(variant, made))
    return tuple(found)


def fitting_variant(plans: tuple[VariantPlan, ...]) -> VariantPlan | None:
    """Of those that fit with ``ROOMY`` tokens of context the one with the largest weights; else that with the most."""

    def order(one: VariantPlan) -> tuple[int, int]:
        if one.plan is None:
            return 0, 0
        book = one.plan.ledger
        weights = sum(line.bytes or 0 for line in (*book.lines, *book.host) if line.name in TARGET_LINES)
        return min(one.plan.context or 0, ROOMY), weights

    return max((one for one in plans if one.fits), key=order, default=None)


def variant_hint(model: str, one: VariantPlan) -> str:
    """How to take a variant that fits."""
    context = "" if one.plan is None or not one.plan.context else f", context {one.plan.context:,}"
    needs = "" if one.plan is None else f"{amount(one.plan.ledger.total)}{context}: "
    return f"pre-quantised it fits ({needs}{one.variant.repo}): dflash pull {model} --variant {one.variant.name}"


def variant_lines(plans: tuple[VariantPlan, ...], width: int) -> list[str]:
    """What each pre-quantised target takes on a machine."""
    columns = (
        Column("VARIANT"),
        Column("FITS"),
        Column("CONTEXT", right=True),
        Column("NEEDS", right=True),
        Column("", shrinks=True),
    )
    rows, reasons = [], []
    for one in plans:
        name = one.variant.name
        if one.plan is None:
            rows.append((name, UNKNOWN, "-", "-", "its recipe is not known before it is here"))
        elif not one.fits and not too_big(one.plan):
            rows.append((name, "no", "-", "-", ""))
            reasons += wrapped(f"{name}: {one.plan.reason}", width)
        else:
            context, total = tokens(one.plan.context), amount(one.plan.ledger.total)
            rows.append((name, "yes" if one.fits else "no", context, total, _how(one.plan)))
    return [*table(columns, rows, width), *reasons] if rows else []


def _known(read: Callable[[Mapping[str, Any], str], Config], config: Mapping[str, Any], source: str) -> Config | None:
    """What is read; None where the registry's copy of a configuration lacks a number."""
    try:
        return read(config, source)
    except UnknownValue:
        if "_inferred" in config:
            return None
        raise


def folder_shapes(name: str, target: Path, drafter: Path | None) -> Shapes | None:
    """The shapes of two folders; None when a config.json cannot be read, which loading will tell better."""
    from dflash_local.config.drafter_config import DrafterConfig
    from dflash_local.config.read_model import read_model

    try:
        shape = read_model(_read(target), name)
        if drafter is None:
            return Shapes(shape, None)
        return Shapes(shape, DrafterConfig.from_shape(_read(drafter), str(drafter)))
    except CheckpointError:
        return None


def row_verdict(row: Row, where: Machine) -> tuple[str, Plan | None]:
    """As ``verdict``, of a pair of the registry before anything of it is here: what every list of pairs shows.

    A pre-quantised target that is published of it counts as the pair.
    """
    from dflash_local.cli.resolve import of_row

    if row.bundled:
        return "fits", None
    known = shapes(of_row(row), None)
    word, found = verdict(row, known, where)
    if word in ("fits", "server") or known is None:
        return word, found
    variant = fitting_variant(variant_plans(row, known, where))
    if variant is None or variant.plan is None:
        return word, found
    return f"fits in {variant.plan.format.partition(' ')[0]}", variant.plan


def verdict(row: Row | None, known: Shapes | None, where: Machine) -> tuple[str, Plan | None]:
    """A word or two on whether a pair runs on a machine, and the plan that does; it need not be a row."""
    from dflash_local.planner.plan import nearest, plan

    if row is not None and (row.runs_on == "server" or row.kind != "dflash"):
        return "server", None
    if known is None:
        return UNKNOWN, None
    found = plan(known.target, known.drafter, where)
    if found.fits:
        return "fits", found
    near = nearest(known.target, known.drafter, where)
    if near is not None:
        return (f"fits in {near.format}" if near.load.draft or known.drafter is None else "target alone"), near
    least = least_needed(known, where)
    return (UNKNOWN, None) if least is None else (f"needs {-(-least // GIB):,} GiB", None)


def least_needed(known: Shapes, where: Machine) -> int | None:
    """Bytes of the smallest way to run a pair at all, at the shortest context; None when unknown."""
    from dflash_local.planner.formats import refusal
    from dflash_local.planner.plan import fits_table, plan

    found = [
        one for one in fits_table(known.target, known.drafter, where) if not refusal(known.target, one.load.quantize)
    ]
    if found and where.kind == "cpu":
        found.append(plan(known.target, known.drafter, where, LoadConfig(dtype="bfloat16")))
    totals = [one.ledger.total for one in found if one.ledger.total is not None]
    return min(totals) if totals else None


def too_big(found: Plan) -> bool:
    """True when sizes are known and memory is what is missing; other objections are the engine's to raise."""
    total = found.ledger.total
    return not found.fits and total is not None and total > found.machine.free


def machine_line(where: Machine) -> str:
    """``CPU, 12.0 GiB free of 15.6 GiB (no GPU was found)``."""
    why = f" ({where.why})" if where.why else ""
    return f"{where.name}, {amount(where.free)} free of {amount(where.memory)}{why}"


def engine_line(found: Plan) -> str:
    """``engine: fused``, whether that has run on such a card, and when all of its context is taken."""
    from dflash_local.planner.verified import standing

    told = [standing(found)] if standing(found) else []
    if found.engine != "fused":
        remark = rounding_remark(found)
        return ", ".join([f"engine: {found.engine}", *told, *([remark] if remark else [])])
    words = ["engine: fused", *told, *found.load.described(BASICS)]
    return f"{', '.join(words)}; it reserves the whole context when it is loaded"


def rounding_remark(found: Plan) -> str:
    """What rounding the weights as they are read comes to on the reference engine; empty where it keeps the codes."""
    if found.load.bitsandbytes:
        return "bitsandbytes: slow"
    return "decoded again: saves no memory here" if found.engine != "fused" and found.load.quantize else ""


def ledger_lines(found: Plan, width: int) -> list[str]:
    """The memory of a plan, line by line, and what it comes to."""
    book = found.ledger
    columns = (Column("MEMORY"), Column("SIZE", right=True), Column("", shrinks=True))
    rows = [(line.name, amount(line.bytes), line.note) for line in book.lines]
    on_host = [(line.name, amount(line.bytes), f"in host memory, not counted; {line.note}") for line in book.host]
    if found.runs_on == "local":
        rows.append(("running", amount(book.running), "all of the above"))
        if book.loading.bytes:
            rows.append((book.loading.name, amount(book.loading.bytes), book.loading.note))
        if book.reserve.bytes:
            rows.append((book.reserve.name, amount(book.reserve.bytes), book.reserve.note))
        rows.append(("needed", amount(book.total), f"of {amount(found.machine.free)} free"))
        rows += on_host
    return table(columns, rows, width)


def fit_lines(known: Shapes, plans: tuple[Plan, ...], width: int) -> list[str]:
    """What fits at which context in which format, or why it does not; the engine's objections stand below."""
    from dflash_local.planner.formats import refusal

    columns = (
        Column("FORMAT"),
        Column("FITS"),
        Column("CONTEXT", right=True),
        Column("NEEDS", right=True),
        Column("", shrinks=True),
    )
    rows, reasons = [], []
    for plan in plans:
        total, refused = plan.ledger.total, refusal(known.target, plan.load.quantize)
        if refused:
            rows.append((plan.format, "no", "-", "-", ""))
            reasons += wrapped(refused if refused.startswith(plan.format) else f"{plan.format}: {refused}", width)
            continue
        fits = "yes" if plan.fits else (UNKNOWN if total is None else "no")
        reasons += wrapped(plan.reason, width) if total is None else []
        rows.append((plan.format, fits, tokens(plan.context), amount(total), _how(plan)))
    return [*table(columns, rows, width), *reasons]


def _how(found: Plan) -> str:
    """What a plan takes beside its format to fit, or by how much it does not."""
    from dflash_local.planner.verified import standing

    total = found.ledger.total
    if not found.fits and total is not None:
        return f"{amount(total - found.machine.free)} too little"
    precision = found.load.drafter_precision if found.engine == "fused" else "auto"
    host = " and ".join(line.name for line in found.ledger.host)
    said = (
        standing(found) if found.fits else "",
        rounding_remark(found),
        "" if precision == "auto" else f"drafter precision {precision}",
        f"{host} in host memory" if host else "",
    )
    return "; ".join(part for part in said if part)


def inferred(known: Shapes) -> list[str]:
    """Which values of the shapes no source quotes, a sentence for each shape."""
    parts = [(known.target.source, known.target.inferred)]
    if known.drafter is not None:
        parts.append((known.drafter.source, known.drafter.inferred))
    return [f"inferred, not quoted by any source, of {name}: {', '.join(names)}" for name, names in parts if names]


def remarks(known: Shapes, width: int) -> list[str]:
    """What the figures leave out, and what they rest on that no source quotes."""
    texts = ["the drafter's shape is unknown: its memory is not counted"] if known.drafter_unknown else []
    if known.target.quantization is not None and known.target.quantization.remark:
        texts.append(known.target.quantization.remark)
    return [line for text in (*texts, *inferred(known)) for line in wrapped(text, width)]


def as_json(found: Plan) -> dict[str, Any]:
    """A plan for ``--json``."""
    from dflash_local.planner.verified import reports_of

    return {**found.as_dict(), "format": found.format, "verified_by_reports": reports_of(found)}


def configuration(part: Repo | Path | None, row: Row | None, places: Places | None) -> Mapping[str, Any] | None:
    """The configuration of a folder, of a repository that is here, or what the registry keeps of it.

    Raises:
        CheckpointError: the folder's or the repository's own is missing or damaged.
    """
    from dflash_local.catalog.shapes import shape

    if part is None:
        return None
    if isinstance(part, Path):
        return _read(part)
    here = places.find(part) if places is not None else None
    if here is not None and (here.folder / "config.json").exists():
        return _read(here.folder)
    kept = shape(part.id)
    return shape(row.drafter.id) if kept is None and row is not None and row.drafter is not None else kept


def _read(folder: Path) -> Mapping[str, Any]:
    return read_model_config(folder, "give the folder that holds config.json")


def per_token(known: Shapes | None) -> dict[str, int | None]:
    """Bytes that a token of context takes in bfloat16, and the recurrent state that no context changes."""
    from dflash_local.planner.memory import context_bytes_per_token, kv_bytes_per_token, state_bytes

    if known is None:
        return {"target_kv": None, "drafter_kv": None, "recurrent_state": None}
    return {
        "target_kv": kv_bytes_per_token(known.target),
        "drafter_kv": None if known.drafter is None else context_bytes_per_token(known.drafter),
        "recurrent_state": state_bytes(known.target),
    }


def per_token_text(known: Shapes) -> str:
    """The same, as one sentence."""
    found = per_token(known)
    parts = [f"target KV {amount(found['target_kv'])}", f"drafter KV {amount(found['drafter_kv'])}"]
    if known.drafter is None:
        del parts[1]
    text = f"in 16 bits a token takes {' and '.join(parts)}"
    state = found["recurrent_state"]
    return f"{text}; the recurrent state {amount(state)} whatever the context" if state else text


def refusal_of(found: Plan, near: Plan | None, hint: str = "") -> DoesNotFitError:
    """The error for a plan that does not fit: what is needed, what is there, what would fit.

    Args:
        hint: of something better than ``near``; that comes behind it.
    """
    from dflash_local.planner.plan import require

    try:
        require(found, near)
    except DoesNotFitError as error:
        if hint:
            error.hint = f"{hint}; or {error.hint}" if near is not None else hint
        return error
    return DoesNotFitError(found.reason)
