"""A pair's speed on this machine before anything is downloaded: its shapes, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from dflash_local.app import fitting
from dflash_local.app.loading import named_when_missing
from dflash_local.app.models import model_store
from dflash_local.app.notices import Notify, progress_of
from dflash_local.app.resolve import Choice, choose, refuse_what_does_not_run
from dflash_local.config.quantizers import USUAL
from dflash_local.errors import DoesNotFitError, SettingsError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.request import check_integer
from dflash_local.settings import Settings, quiet_libraries
from dflash_local.tables import amount

if TYPE_CHECKING:
    from dflash_local.bench.random_pair import RandomPair
    from dflash_local.bench.random_run import Measures, Place, RandomFigures
    from dflash_local.bench.report import Found
    from dflash_local.catalog.row import Repo
    from dflash_local.planner.machine import Machine

CONTEXT = 1024
PREFILL = 8192
PLAIN_FORMAT = "bfloat16"  # of random weights that no layout was asked for
MAX_CONTEXTS = 8


@dataclass(frozen=True, slots=True)
class RandomOptions:
    """What is measured of random weights. Nothing given is None or empty.

    Attributes:
        lengths: tokens per cycle to project tok/s at. stored: the target's format, of ``config.quantizers.USUAL``.
        routing: of a mixture's rows. columns: that lines may be wide.
    """

    load: LoadConfig = LoadConfig()
    drafter: str | None = None
    contexts: tuple[int, ...] = ()
    block_size: int | None = None
    prefill: int | None = None
    lengths: tuple[float, ...] = ()
    baselines: bool = False
    stored: str | None = None
    routing: str | None = None
    columns: int = 80


def bench_random(
    model: str,
    options: RandomOptions,
    user: Settings,
    notify: Notify,
    place: Place | None = None,
    machine: Machine | None = None,
) -> Found:
    """Measure and tell.

    Args:
        place: where and how it is measured; the CUDA GPU that the options name if not given.
        machine: whose free memory counts; that of ``place`` if not given.

    Raises:
        UsageError: a bad option, no CUDA GPU, or a pair that the fused engine does not know.
        SettingsError: nothing is known of its shape. DoesNotFitError: the GPU has not enough free memory.
    """
    choice = choose(model, options.drafter, user)
    choice.announce(notify)
    refuse_what_does_not_run(choice)
    quiet_libraries()
    with named_when_missing():
        from dflash_local.bench import random_report, random_run
        from dflash_local.bench.baselines import run_all, tasks
    pair = _pair(choice, user, options.stored)
    if options.baselines and pair.model.quantization is not None:
        raise UsageError("--baselines measures plain weights", "leave it out, or take --weights random")
    lengths, block = options.lengths, pair.config.block_size
    published = () if choice.drafter_row is None else choice.drafter_row.published
    stated = random_report.assumption(lengths, published, block)
    if any(length > block for length in lengths):
        raise UsageError(f"--acceptance {max(lengths):g} is more than the drafter's block of {block}")
    measures = _measures(options, pair, stated.rows)
    place = place or random_run.gpu(options.load.device, options.load.dtype)
    machine = machine or random_run.machine(place)
    measures = replace(measures, load=_planned_load(choice, user, pair, measures, machine, place))
    progress = progress_of(notify)
    found = random_run.measure(pair, measures, place, lambda text, part: progress(f"measuring {text}", part))
    others = tuple(run_all(tasks(pair, measures.contexts[0], place), progress)) if options.baselines else ()
    if place.device.type == "cuda" and not pair.toy and not measures.load.exact:
        _keep_speeds(pair, found, machine, measures.load.kv_cache, user)
    report = random_report.random_report(pair, measures, place, found, stated, others)
    report["row"] = choice.shared_row
    return report, random_report.random_lines(pair, measures, place, found, stated, others, options.columns)


def _keep_speeds(pair: RandomPair, found: RandomFigures, machine: Machine, kv_cache: str, user: Settings) -> None:
    """Let later plans for this card begin from what was measured."""
    from dflash_local.planner.load import Load
    from dflash_local.planner.speed import Times, predict_load
    from dflash_local.planner.speed_record import SpeedMeasurement, SpeedRecord
    from dflash_local.store.paths import speeds_folder

    config, block = LoadConfig(drafter_precision=found.drafter_precision, kv_cache=kv_cache), pair.config.block_size
    stored = pair.model.quantization
    weights = PLAIN_FORMAT if stored is None else stored.name
    kept = []
    for at in found.at:
        predicted = predict_load(machine, pair.model, pair.config, Load.of("cuda", config, at.context, block))
        cycle = at.cycle.get(block)
        shorter = tuple((rows, one.ms) for rows, one in sorted(at.cycle.items()) if rows < block)
        times = Times(at.context, at.step.ms, None if cycle is None else cycle.ms, block, shorter)
        kept.append(SpeedMeasurement.of(machine.name, pair.target, weights, config, times, predicted))
    SpeedRecord(speeds_folder(user), machine.name).add(kept)


def _pair(choice: Choice, user: Settings, stored: str | None) -> RandomPair:
    """The pair's shapes: from its files where they are here, else from the registry."""
    from dflash_local.bench.random_pair import read_pair

    own, row = choice.own_drafter, choice.row
    name, config = _known_shape(choice, "target", choice.target, user)
    target = name, config if stored is None else {**config, "quantization_config": USUAL[stored]}
    drafter = _known_shape(choice, "drafter", choice.drafter, user)
    toy = row is not None and row.bundled is not None
    return read_pair(target, drafter, row.fingerprints if row is not None and own else (), toy)


def _known_shape(choice: Choice, role: str, part: Repo | Path | None, user: Settings) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of one of the two."""
    if part is None:
        raise UsageError(f"no {role} is known for {choice.name}", "give its folder or repository with --drafter")
    row = choice.row if role == "drafter" and choice.own_drafter else None
    config = fitting.configuration(part, row, model_store(user))
    name = part.name if isinstance(part, Path) else part.id
    if config is None:
        raise SettingsError(
            f"nothing is known of the shape of the {role} {name}", f"dflash pull {choice.name} reads it"
        )
    return (f"{choice.name}'s {role}" if isinstance(part, Path) else name), config


def _measures(options: RandomOptions, pair: RandomPair, published: tuple[int, ...]) -> Measures:
    """What is measured, every number checked against what both models were made for."""
    from dflash_local.bench.random_run import Measures, Routing, rows_of
    from dflash_local.engine.drafter_precision import precision_of

    block = pair.config.block_size
    limits = (pair.facts.model.max_position_embeddings, pair.config.max_position_embeddings)
    limit = min(filter(None, limits), default=None)
    most = (limit or CONTEXT * 4) - block
    contexts = tuple(dict.fromkeys(options.contexts)) or (min(CONTEXT, most),)
    for context in contexts:
        check_integer("context", context, 1, most)
    if len(contexts) > MAX_CONTEXTS:
        raise UsageError(f"{len(contexts)} contexts are asked for", f"give at most {MAX_CONTEXTS}")
    prefill = min(PREFILL, most) if options.prefill is None else options.prefill
    check_integer("prefill", prefill, 0, most)
    precision_of(options.load.drafter_precision, pair.facts.model.vocab_size)
    chained = pair.config.passes > 1  # each draft costs a pass: every length is another cycle
    rows = tuple(range(1, block + 1)) if chained else rows_of(block, published)
    if options.block_size is not None:
        check_integer("block_size", options.block_size, 2, block)
        rows = (options.block_size,)
    if options.routing is not None and pair.model.dense:
        raise UsageError(f"{pair.target} has no experts to route to", "leave out --routing")
    routing = options.routing or "uniform"
    if routing not in get_args(Routing):
        raise UsageError(f"--routing {routing}: no such routing", f"give {' or '.join(get_args(Routing))}")
    return Measures(contexts, rows, prefill, options.load, cast(Routing, routing))


def _planned_load(
    choice: Choice, user: Settings, pair: RandomPair, measures: Measures, machine: Machine, place: Place
) -> LoadConfig:
    """The load with its plan's chunk of a prompt. DoesNotFitError: it does not fit, before anything is allocated."""
    from dflash_local.bench.random_run import SLACK
    from dflash_local.planner.plan import context_limit, plan

    known = fitting.shapes(choice, model_store(user))
    if known is None:
        return measures.load
    context = min(measures.room, context_limit(known.target, known.drafter))
    dtype = str(place.dtype).removeprefix("torch.")
    engine = "fused" if machine.kind == "cuda" else "auto"
    # As it is built.
    config = replace(measures.load, dtype=dtype, context=context, engine=engine, offload="none")
    target = replace(known.target, quantization=pair.model.quantization)
    found = plan(target, known.drafter, machine, config)
    if not fitting.too_big(found):
        return replace(measures.load, prefill_chunk=found.load.prefill_chunk)
    least = plan(target, known.drafter, machine, replace(config, context=min(CONTEXT + SLACK, context)))
    smaller = f"--context {CONTEXT} --prefill 0 would fit" if least.fits and context > CONTEXT + SLACK else ""
    hint = smaller or f"--weights random:int4-g128 takes least; dflash show {choice.name} tells what fits"
    raise DoesNotFitError(
        f"{choice.name} in {found.format} needs {amount(found.ledger.total)} at context {context}, "
        f"{machine.name} has {amount(machine.free)} free",
        hint,
    )
