"""Asks the planner what a pair takes: of a name, of folders, of a row; on this machine or another.

Shapes come from the files when they are here, else from the registry. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_local.app.models import ModelStore
from dflash_local.app.notices import Notify
from dflash_local.app.resolve import Choice, choose, of_row
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.checkpoint_files.source import needed_config, open_source
from dflash_local.errors import CheckpointError, DoesNotFitError, SettingsError, UsageError
from dflash_local.events import Notice
from dflash_local.load_config import BALANCED, takes_several

if TYPE_CHECKING:
    from dflash_local.catalog.bundled import Pair
    from dflash_local.catalog.row import Repo, Row
    from dflash_local.config.features import ModelConfig
    from dflash_local.drafters.drafter import Drafter
    from dflash_local.loaded import SessionFacts
    from dflash_local.planner.card_probe import CardProbe
    from dflash_local.planner.cpu_probe import CpuRates
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.settings import Settings

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Holds the shapes of a pair. ``drafter`` is None when there is none, or nothing is known of it."""

    target: ModelConfig
    drafter: Drafter | None
    drafter_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """Holds a pair that is in memory, and how it was loaded."""

    pair: Pair
    facts: SessionFacts


def machine(
    user: Settings,
    gpu: str | None = None,
    memory_gib: float | None = None,
    device: str | None = None,
    loaded: Loaded | None = None,
    count: int = 1,
    notify: Notify | None = None,
    others: Sequence[str] = (),
) -> Machine:
    """Describe the machine named by the options, else this one.

    Args:
        device: None takes that of the settings, where it is there; of named GPUs balanced spreads layers over them.
        count: so many of the GPU that is named. others: named GPUs beside it.
        loaded: what this process has loaded and would give back for another pair: it counts as free.
        notify: lets a CPU or a card that was never probed be measured, and says so; without it only a kept probe is
            taken.

    Raises:
        UsageError: no such card, not a size, a number of nothing, or a device that is not there.
    """
    from dflash_local.planner.machine import named, several_named

    if count > 1 and gpu is None and memory_gib is None:
        raise UsageError(f"--gpus {count} needs to know which", "--gpu 'RTX 4090' or --gpu-memory 24")
    if others and (count > 1 or memory_gib is not None):
        raise UsageError("--gpu is given more than once", "each names one card: leave out --gpus and --gpu-memory")
    if gpu is not None or memory_gib is not None:
        found = named(gpu, memory_gib, count) if gpu is None or not others else several_named([gpu, *others])
        if device != BALANCED or found.count == 1:
            return found
        return replace(found.together(), why=f"layers spread over all of them; {found.others[0].why}")
    found = _this_machine(user, device, _given_back(loaded))
    if found.kind == "cpu":
        return replace(found, rates=_cpu_rates(user, notify))
    return _measured(found, user, notify) if found.runs_kernels(dense=False) else found


def _this_machine(user: Settings, device: str | None, given_back: Mapping[str, int]) -> Machine:
    from dflash_local.planner.machine import this_machine

    if device is None:
        with suppress(UsageError):  # it is not there, which a load says
            return this_machine(user.load_config.device, user.environ, given_back=given_back)
    return this_machine(device or "auto", user.environ, given_back=given_back)


def _measured(found: Machine, user: Settings, notify: Notify | None) -> Machine:
    """Add the probes of the chosen GPU and of the first two, over which layers can be spread."""
    gpus = found.cards or found.gpus
    known = []
    for index, gpu in enumerate(gpus):
        if index < 2 or gpu.device == found.device:
            second = gpus[1] if index == 0 and len(gpus) > 1 else None
            gpu = replace(gpu, probe=_card_probe(gpu, second, user, notify))
        known.append(gpu)
    if found.cards:
        return replace(found, cards=tuple(known))
    own = next(gpu for gpu in known if gpu.device == found.device)
    return replace(own, others=tuple(gpu for gpu in known if gpu is not own))


def _card_probe(card: Machine, second: Machine | None, user: Settings, notify: Notify | None) -> CardProbe | None:
    """Read the kept probe of this card; without one take a new one, if somebody can be told why that takes seconds.

    Args:
        second: the card to which the way is wanted, too; one that is busy is left out.
    """
    from dflash_local.planner import card_probe
    from dflash_local.store.paths import speeds_folder

    folder = speeds_folder(user)

    def idle(gpu: Machine) -> bool:
        return gpu.free >= card_probe.FREE_SHARE * gpu.memory

    found = card_probe.read(folder, card.name)
    other = second if second is not None and idle(second) else None
    known = found is not None and (other is None or found.link_to(other.name) is not None)
    if not known and notify is not None and idle(card):
        way = "" if other is None else f", and the way to {other.name} and back"
        notify(Notice(f"measuring how fast {card.name} reads and multiplies{way}, once, for about half a minute"))
        found = card_probe.take(folder, card.device, card.name, "" if other is None else other.device) or found
    return found


def _cpu_rates(user: Settings, notify: Notify | None) -> CpuRates | None:
    """Read the kept probe of this CPU; without one take a new one, if somebody can be told why that takes seconds."""
    from dflash_local.planner import cpu_probe
    from dflash_local.store.paths import speeds_folder

    folder, cpu = speeds_folder(user), cpu_probe.this_cpu(user.environ)
    found = cpu_probe.read(folder, cpu)
    if found is None and notify is not None:
        notify(Notice("measuring how fast this CPU reads its memory, once, for ten seconds at most"))
        quiet = cpu_probe.is_quiet()
        found = cpu_probe.probe(cpu)
        if quiet and cpu_probe.is_quiet():  # a machine that becomes busy meanwhile makes its CPU look slow for good
            cpu_probe.add(folder, found)
        else:
            notify(Notice("other programs were busy meanwhile: the next plan measures again"))
    return found


def _given_back(loaded: Loaded | None) -> dict[str, int]:
    """Sum the bytes by device that unloading a pair frees; nothing for a server's."""
    from dflash_local.planner.plan import held

    facts = None if loaded is None else loaded.facts
    if loaded is None or facts is None or facts.in_server or takes_several(facts.device):
        return {}
    pair = loaded.pair
    known = folder_shapes(pair.name, pair.target, pair.drafter if facts.drafter is not None else None)
    device = "cuda:0" if facts.device == "cuda" else facts.device
    return {} if known is None else {device: held(known.target, known.drafter, facts)}


def shapes(choice: Choice, store: ModelStore | None) -> Shapes | None:
    """Read what is known of both shapes; None when not even that of the target is.

    Raises:
        CheckpointError: the config.json of a folder that was named is missing, damaged or of another architecture.
    """
    from dflash_local.config.read_model import read_model
    from dflash_local.drafters.kinds import drafter_of_shape

    part, drafter = choice.target, choice.drafter
    if choice.package is not None and choice.row is not None and isinstance(part, Path) and not part.exists():
        part = choice.row.target
    name = choice.name if part is None or isinstance(part, Path) else part.id
    try:
        config = configuration(part, None, store) or _of_variant(choice)
        target = None if config is None else _known(read_model, config, name)
        if target is None or drafter is None:
            return None if target is None else Shapes(target, None)
        config = configuration(drafter, choice.row if choice.own_drafter else None, store)
        source = str(drafter) if isinstance(drafter, Path) else drafter.id
        known = None if config is None else _known(drafter_of_shape, config, source)
        return Shapes(target, known, drafter_unknown=known is None)
    except CheckpointError:
        if store is None or isinstance(choice.target, Path) or isinstance(drafter, Path):
            raise
        return shapes(choice, None)  # a download that is damaged, which loading will tell better


def known_shapes(choice: Choice, store: ModelStore | None) -> Shapes:
    """Read both shapes. SettingsError: nothing is known of the target's; CheckpointError: as of ``shapes``."""
    known = shapes(choice, store)
    if known is None:
        raise unknown_shape(choice)
    return known


def unknown_shape(choice: Choice) -> SettingsError:
    return SettingsError(f"nothing is known of the shape of {choice.name}", f"dflash pull {choice.name} reads it")


def _of_variant(choice: Choice) -> Mapping[str, Any] | None:
    """Make the configuration of a pre-quantised target by its row; None where the recipe is not known."""
    from dflash_local.catalog.shapes import shape
    from dflash_local.catalog.variant_config import quantization_config

    row = choice.row
    if row is None or row.target is None or choice.target is None or isinstance(choice.target, Path):
        return None
    variant = row.variant(choice.name)
    plain, stored = shape(row.target.id), None if variant is None else quantization_config(variant)
    return None if plain is None or stored is None else {**plain, "quantization_config": stored}


def _known(read: Callable[[Mapping[str, Any], str], Config], config: Mapping[str, Any], source: str) -> Config | None:
    """Return what is read; None where the registry's copy of a configuration lacks a number."""
    try:
        return read(config, source)
    except UnknownValue:
        if "_inferred" in config:
            return None
        raise


def folder_shapes(name: str, target: Path, drafter: Path | None) -> Shapes | None:
    """Read the shapes of two folders; None when a config.json cannot be read, which loading will tell better."""
    try:
        return shapes(Choice(name, target, drafter), None)
    except CheckpointError:
        return None


def configuration(part: Repo | Path | None, row: Row | None, store: ModelStore | None) -> Mapping[str, Any] | None:
    """Read the configuration of a folder, of a repository that is here, or what the registry keeps of it.

    Raises:
        CheckpointError: the folder's or the repository's own is missing or damaged.
    """
    from dflash_local.catalog.shapes import shape

    if part is None:
        return None
    if isinstance(part, Path):
        return needed_config(open_source(part))
    here = store.find(part) if store is not None else None
    if here is not None and (known := open_source(here.folder).config()) is not None:
        return known
    kept = shape(part.id)
    return shape(row.drafter.id) if kept is None and row is not None and row.drafter is not None else kept


def too_big(found: Plan) -> bool:
    """Say whether sizes are known and memory is what is missing; other objections are the engine's to raise."""
    return not found.fits and found.lacking > 0


def refusal_of(found: Plan, near: Plan | None, hint: str = "") -> DoesNotFitError:
    """Make the error for a plan that does not fit: what is needed, what is there, what would fit.

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
    from dflash_local.planner.reported import reports_of

    return {**found.as_dict(), "verified_by_reports": reports_of(found)}


def per_token(known: Shapes | None) -> dict[str, int | None]:
    """Return bytes that a token of context takes in bfloat16, and the recurrent state that no context changes."""
    from dflash_local.planner.memory import context_bytes_per_token, kv_bytes_per_token, state_bytes

    if known is None:
        return {"target_kv": None, "drafter_kv": None, "recurrent_state": None}
    return {
        "target_kv": kv_bytes_per_token(known.target),
        "drafter_kv": None if known.drafter is None else context_bytes_per_token(known.drafter),
        "recurrent_state": state_bytes(known.target),
    }


def inferred(known: Shapes) -> list[str]:
    """Tell which values of the shapes no source quotes, a sentence for each shape."""
    parts = [(known.target.source, known.target.inferred)]
    if known.drafter is not None:
        parts.append((known.drafter.source, known.drafter.inferred))
    return [f"inferred, not quoted by any source, of {name}: {', '.join(names)}" for name, names in parts if names]


def row_choice(row: Row, user: Settings) -> Choice:
    """Choose a row's own pair: two repositories, the bundled folders, or a package's file."""
    return choose(row.name, None, user) if row.bundled or row.package else of_row(row)
