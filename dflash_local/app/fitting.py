"""Asks the planner what a pair takes: of a name, of folders, of a row; on this machine or another.

Shapes come from the files when they are here, else from the registry. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_local.app.models import ModelStore, registry
from dflash_local.app.notices import Notify
from dflash_local.app.resolve import Choice, choose, of_row
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.checkpoint_files.model_config import read_model_config
from dflash_local.errors import CheckpointError, DFlashError, DoesNotFitError, UsageError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.tables import GIB, UNKNOWN, amount

if TYPE_CHECKING:
    from dflash_local.catalog.bundled import Pair
    from dflash_local.catalog.row import Repo, Row, Variant
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


def shapes(choice: Choice, store: ModelStore | None) -> Shapes | None:
    """What is known of both shapes; None when not even that of the target is.

    Raises:
        CheckpointError: the config.json of a folder that was named is missing, damaged or of another architecture.
    """
    try:
        return _shapes(choice, store)
    except CheckpointError:
        if store is None or isinstance(choice.target, Path) or isinstance(choice.drafter, Path):
            raise
        return _shapes(choice, None)  # a download that is damaged, which loading will tell better


def _shapes(choice: Choice, store: ModelStore | None) -> Shapes | None:
    from dflash_local.config.drafter_config import DrafterConfig
    from dflash_local.config.read_model import read_model

    config = configuration(choice.target, None, store) or _of_variant(choice)
    name = choice.name if choice.target is None or isinstance(choice.target, Path) else choice.target.id
    target = None if config is None else _known(read_model, config, name)
    if target is None:
        return None
    if choice.drafter is None:
        return Shapes(target, None)
    row = choice.row if choice.own_drafter else None
    readable = row is None or row.kind == "dflash"  # of its relatives nothing here knows what they take
    config = configuration(choice.drafter, row, store) if readable else None
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


def configuration(part: Repo | Path | None, row: Row | None, store: ModelStore | None) -> Mapping[str, Any] | None:
    """The configuration of a folder, of a repository that is here, or what the registry keeps of it.

    Raises:
        CheckpointError: the folder's or the repository's own is missing or damaged.
    """
    from dflash_local.catalog.shapes import shape

    if part is None:
        return None
    if isinstance(part, Path):
        return _read(part)
    here = store.find(part) if store is not None else None
    if here is not None and (here.folder / "config.json").exists():
        return _read(here.folder)
    kept = shape(part.id)
    return shape(row.drafter.id) if kept is None and row is not None and row.drafter is not None else kept


def _read(folder: Path) -> Mapping[str, Any]:
    return read_model_config(folder, "give the folder that holds config.json")


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
    row: Row | None, known: Shapes, where: Machine, load: LoadConfig | None = None, store: ModelStore | None = None
) -> tuple[VariantPlan, ...]:
    """A plan for each pre-quantised target that the registry lists beside a row's own target.

    Args:
        known: of the row's own target; its drafter is every variant's. load: what is asked for; a variant brings its
            own weight format.
    """
    from dflash_local.catalog.row import Repo
    from dflash_local.planner.plan import plan

    load = replace(load or LoadConfig(), quantize=None)
    found = []
    for variant in row.variants if row is not None else ():
        choice = Choice(variant.repo, Repo(variant.repo, variant.revision), None, row)
        own = shapes(choice, store)
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


def row_verdict(row: Row, where: Machine) -> tuple[str, Plan | None]:
    """As ``verdict``, of a pair of the registry before anything of it is here: what every list of pairs shows.

    A pre-quantised target that is published of it counts as the pair.
    """
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


def as_json(found: Plan) -> dict[str, Any]:
    """A plan for ``--json``."""
    from dflash_local.planner.verified import reports_of

    return {**found.as_dict(), "format": found.format, "verified_by_reports": reports_of(found)}


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


def inferred(known: Shapes) -> list[str]:
    """Which values of the shapes no source quotes, a sentence for each shape."""
    parts = [(known.target.source, known.target.inferred)]
    if known.drafter is not None:
        parts.append((known.drafter.source, known.drafter.inferred))
    return [f"inferred, not quoted by any source, of {name}: {', '.join(names)}" for name, names in parts if names]


@dataclass(frozen=True, slots=True)
class PairPlans:
    """What the planner says of a pair on a machine: the plan of a load, and one for each format and variant."""

    where: Machine
    known: Shapes | None
    plan: Plan | None
    table: tuple[Plan, ...]
    variants: tuple[VariantPlan, ...] = ()


def pair_plans(
    known: Shapes | None, where: Machine, row: Row, load: LoadConfig | None = None, store: ModelStore | None = None
) -> PairPlans:
    """Ask the planner for the plan of a load and for every format."""
    if known is None:
        return PairPlans(where, None, None, ())
    from dflash_local.planner.plan import fits_table, plan

    found = plan(known.target, known.drafter, where, load, runs_on=row.runs_on)
    if row.runs_on != "local" or row.kind != "dflash":
        return PairPlans(where, known, found, ())
    table = fits_table(known.target, known.drafter, where, load)
    return PairPlans(where, known, found, table, variant_plans(row, known, where, load, store))


def row_shapes(row: Row, user: Settings, store: ModelStore | None) -> Shapes | None:
    """The shapes of a row's pair; see ``shapes``."""
    return shapes(choose(row.bundled, None, user) if row.bundled else of_row(row), store)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the planner says of a pair on this machine; ``limit`` is the context both models were made for."""

    known: Shapes
    where: Machine
    found: Plan
    limit: int


def _planned(pair: Pair, load: LoadConfig, user: Settings) -> _Planned | None:
    """None when a config.json cannot be read, which loading will tell better.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.planner import plan as planner
    from dflash_local.planner.machine import this_machine

    known = folder_shapes(pair.name, pair.target, pair.drafter if load.draft else None)
    if known is None:
        return None
    where = this_machine(load.device, user.environ)
    found = planner.plan(known.target, known.drafter, where, load)
    return _Planned(known, where, found, planner.context_limit(known.target, known.drafter))


def planned_context(pair: Pair, load: LoadConfig, user: Settings) -> int | None:
    """Tokens that the session would hold if it were loaded now; None where only the load can tell."""
    try:
        planned = _planned(pair, load, user)
    except DFlashError:  # the load says it
        return None
    if load.context is not None or planned is None:
        return load.context
    return planned.found.context if load.fit_check and planned.found.fits else planned.limit


def planned_peak(pair: Pair, load: LoadConfig, user: Settings) -> int | None:
    """Bytes that the plan of a load says torch's allocator holds at most; None where nothing is planned.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    planned = _planned(pair, load, user)
    return None if planned is None else planned.found.ledger.peak


def fitted(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> LoadConfig:
    """What the plan loads: the context and the drafter precision that fit, where the user named none.

    Raises:
        DriverError: there is an NVIDIA card, and the installed torch cannot use it.
        DoesNotFitError: not even the shortest context fits, or not the one asked for; names what would fit.
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.planner.plan import nearest
    from dflash_local.planner.torch_build import require_usable

    require_usable(load.device, user.environ)
    planned = _planned(pair, load, user) if load.fit_check else None
    if planned is None:
        return load
    known, where, found = planned.known, planned.where, planned.found
    if too_big(found):
        refusal = refusal_of(
            found, nearest(known.target, known.drafter, where, load), _variant_hint(pair, known, where, load, user)
        )
        refusal.hint = f"{refusal.hint}; --no-fit-check loads it all the same"
        raise refusal
    plan = replace(found.load, draft=load.draft) if found.fits else load
    if load.device == "auto" and where.device.startswith("cuda:") and where.device != "cuda:0":
        plan = replace(plan, device=where.device)  # the engine's own choice would be the first GPU
        notify(Notice(f"on {where.device}, {where.name}: {where.why}"))
    if plan.drafter_precision != load.drafter_precision:
        notify(Notice(f"drafter precision {plan.drafter_precision}: what fits on {where.name}; no reply changes by it"))
    if plan.offload != load.offload:
        lines = " and ".join(f"{line.name} ({amount(line.bytes)})" for line in found.ledger.host)
        notify(Notice(f"in host memory: {lines}: what fits on {where.name}; the same bits"))
    if load.context is None and plan.context is not None and plan.context < planned.limit:
        notify(Notice(f"context {plan.context:,} of {planned.limit:,}: what fits on {where.name}"))
    return plan


def _variant_hint(pair: Pair, known: Shapes, where: Machine, load: LoadConfig, user: Settings) -> str:
    """How to take a pre-quantised target that fits instead; empty where none is known to."""
    row = registry(user).find(pair.name)
    if row is None or row.target is None or row.name != pair.name:
        return ""
    better = fitting_variant(variant_plans(row, known, where, load))
    return "" if better is None else variant_hint(pair.name, better)
