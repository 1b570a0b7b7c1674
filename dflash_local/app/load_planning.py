"""What a load of a pair's folders takes on this machine: the options that fit where the user named none."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dflash_local.app.fitting import Shapes, folder_shapes, machine, refusal_of, too_big
from dflash_local.app.models import registry
from dflash_local.app.notices import Notify
from dflash_local.app.recommending import recommended
from dflash_local.app.resolve import Choice, of_row
from dflash_local.errors import CheckpointError, DFlashError, DoesNotFitError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.tables import amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_local.catalog.bundled import Pair
    from dflash_local.config.features import ModelConfig
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.service.backend import Backend
    from dflash_local.settings import Settings


class _Planned(NamedTuple):
    """Holds what the planner says of a pair on this machine; ``limit`` is the context both models were made for."""

    known: Shapes
    where: Machine
    found: Plan
    limit: int


class TaskLoad(NamedTuple):
    """Holds what loads a pair for a task, what the planner says of it, and the bytes that the task takes beside it."""

    load: LoadConfig
    target: ModelConfig
    plan: Plan
    beside: int


def _planned(pair: Pair, load: LoadConfig, user: Settings, beside: int = 0) -> _Planned | None:
    """Plan a load; None when a config.json cannot be read, which loading will tell better.

    Args:
        beside: bytes of each device that something else is to have.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.planner import plan as planner

    known = folder_shapes(pair.name, pair.target, pair.drafter if load.draft else None)
    if known is None:
        return None
    where = _without(machine(user, device=load.device), beside)
    found = planner.plan(known.target, known.drafter, where, load)
    return _Planned(known, where, found, planner.context_limit(known.target, known.drafter))


def _without(where: Machine, size: int) -> Machine:
    cards = tuple(_without(card, size) for card in where.cards)
    return replace(where, free=where.free - size, cards=cards)


def planned_context(pair: Pair, load: LoadConfig, user: Settings) -> int | None:
    """Return the tokens that the session would hold if it were loaded now; None where only the load can tell."""
    try:
        planned = _planned(pair, load, user)
    except DFlashError:  # the load says it
        return None
    if load.context is not None or planned is None:
        return load.context
    return planned.found.context if load.fit_check and planned.found.fits else planned.limit


def planned_peak(pair: Pair, load: LoadConfig, user: Settings) -> int | None:
    """Return the bytes that the plan of a load says torch's allocator holds at most; None where nothing is planned.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    planned = _planned(pair, load, user)
    return None if planned is None else planned.found.ledger.peak


def keep_speed(session: Backend, pair: Pair, user: Settings) -> None:
    """Let later plans for this card begin from the cycles that a load on it has measured.

    Nothing is kept of another engine than the fused one, nor where no drafter or no GPU was measured.
    """
    from dflash_local.drafters.with_mtp import drafters_of
    from dflash_local.engine.costs import AT
    from dflash_local.engine.fused_runner import FusedRunner
    from dflash_local.layout.quantized import quantized
    from dflash_local.planner.load import Load
    from dflash_local.planner.speed import Times, predict_load
    from dflash_local.planner.speed_record import SpeedMeasurement, SpeedRecord
    from dflash_local.store.paths import speeds_folder

    runner, load = getattr(session, "runner", None), session.facts.load  # a session may be another process's
    block = session.facts.block_size
    if not isinstance(runner, FusedRunner) or not {1, block} <= runner.costs.keys():
        return
    planned = None
    with suppress(DFlashError):  # what was loaded answers; only its speed is not kept
        planned = _planned(pair, load, user)
    if planned is None or planned.found.engine != "fused":
        return
    context = min(AT, runner.context // 2)
    config = planned.found.load
    target = quantized(planned.known.target, config.quantize)
    drafter = drafters_of(planned.known.target, planned.known.drafter, config)
    predicted = predict_load(planned.found.machine, target, drafter, Load.of("cuda", config, context, block))
    shorter = tuple((rows, ms) for rows, ms in sorted(runner.costs.items()) if 1 < rows < block)
    times = Times(context, runner.costs[1], runner.costs[block], block, shorter)
    source, weights = planned.known.target.source, planned.found.format
    kept = SpeedMeasurement.of(planned.where.name, source, weights, config, times, predicted)
    SpeedRecord(speeds_folder(user), planned.where.name).add([kept])


def fitted_for_task(
    context: int,
    beside: Callable[[ModelConfig, str, int], int],
    pair: Pair,
    load: LoadConfig,
    user: Settings,
    notify: Notify,
) -> TaskLoad:
    """Return what loads a pair for a task that needs so much context at most, in chunks of the model's own.

    Args:
        beside: what the task takes of the device as long as the pair is loaded, by the target, its dtype and the tokens
            of a prompt that go through it at once.

    Raises:
        CheckpointError: a config.json cannot be read. Others as ``fitted``.
    """
    from dflash_local.layout.cycle import CODED_CHUNK_MOST, prompt_chunk
    from dflash_local.layout.quantized import quantized
    from dflash_local.planner import plan as planner

    first = _planned(pair, load, user)
    if first is None:
        raise CheckpointError(f"the shapes of {pair.name} are not known: a config.json cannot be read")
    target = first.known.target
    room = beside(target, first.found.dtype, load.prefill_chunk or CODED_CHUNK_MOST)
    given, load = load, fitted(pair, load, user, notify, room)
    context = given.context or min(context, first.limit, load.context or first.limit)
    chunk = prompt_chunk(quantized(target, load.quantize), context, given.prefill_chunk)
    load = replace(load, context=context, prefill_chunk=chunk)
    found = planner.plan(target, first.known.drafter, first.where, load)
    return TaskLoad(load, target, found, beside(target, found.dtype, chunk))


def fitted(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, beside: int = 0) -> LoadConfig:
    """Return what the plan loads: the context and the drafter precision that fit, where the user named none.

    Args:
        beside: bytes of the device that something else is to have.

    Raises:
        DriverError: there is an NVIDIA card, and the installed torch cannot use it.
        DoesNotFitError: not even the shortest context fits, or not the one asked for; names what would fit.
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.planner.plan import USABLE, nearest
    from dflash_local.planner.torch_build import require_usable

    require_usable(load.device, user.environ)
    planned = _planned(pair, load, user, beside) if load.fit_check else None
    if planned is None:
        return load
    known, where, found = planned.known, planned.where, planned.found
    short = found.fits and load.context is None and (found.context or 0) < min(USABLE, planned.limit)
    if load.quantize is None and (short or too_big(found)):
        best = recommended(Choice(pair.name, pair.target, pair.drafter), known, where, user, load).best
        slow = best is not None and (best.config.bitsandbytes or best.config.dtype != load.dtype)  # only by its option
        if best is not None and best.config != load and not slow:
            why = f"else only {found.context:,} tokens of context fit" if short else found.reason
            notify(Notice(f"{best.name} ({amount(best.plan.ledger.total)}): {why}"))
            found, load = best.plan, best.config
    if too_big(found):
        refusal = refusal_of(
            found, nearest(known.target, known.drafter, where, load), _variant_hint(pair, known, where, load, user)
        )
        refusal.hint = f"{refusal.hint}; --no-fit-check loads it all the same"
        raise refusal
    if found.crowded:
        if (found.ledger.loading.bytes or 0) > (where.free_now or 0):
            raise DoesNotFitError(f"{pair.name} {found.crowded}", "--no-fit-check loads it all the same")
        notify(Notice(f"{pair.name} {found.crowded}", "warning"))
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
    """Write the command that gets a pre-quantised target which fits instead; nothing where none is known to."""
    row = registry(user).find(pair.name)
    if row is None or row.target is None or row.name != pair.name:
        return ""
    best = recommended(of_row(row), known, where, user, load).best
    variant = None if best is None else best.weights.variant
    if best is None or variant is None:
        return ""
    needs = f"{amount(best.plan.ledger.total)}, context {best.plan.context:,}: {variant.model}"
    return f"pre-quantised it fits ({needs}): dflash pull {pair.name} --variant {variant.name}"
