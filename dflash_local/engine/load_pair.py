"""Load a ``Session`` from two folders: contract first, then weights, then caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dflash_local.catalog.bundled import Pair
from dflash_local.chat.stop_ids import config_stop_ids
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.config.quantization import kept_format
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.mtp.layout import MTPConfig
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.engine.device_faults import NO_KERNELS, first_line, is_lost, is_out_of_memory
from dflash_local.engine.engines import load_runner
from dflash_local.engine.session import Session
from dflash_local.errors import CheckpointError, DeviceLostError, DoesNotFitError, DriverError, UsageError
from dflash_local.events import LoadProgress
from dflash_local.kernels.allocate import make_current
from dflash_local.load_config import FREQUENT_HEADS, OFFLOADS, LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.models.adapted_drafter import adapted
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.load_target import DTYPES, placement
from dflash_local.models.pair import PairFacts, check_pair, check_tokenizer_size, open_drafter
from dflash_local.models.target_facts import TargetFacts
from dflash_local.planner.formats import cpu_dtype
from dflash_local.planner.hardware import computes_bfloat16
from dflash_local.planner.torch_build import FOR_OLD_CARDS
from dflash_local.store.said_record import SaidRecord

DEFAULT_CONTEXT = 4096  # for a target whose configuration names none
NO_LAYER = "--mtp: the target's files have no MTP layer that can be read, so the drafter drafts alone"


def load(
    pair: Pair,
    config: LoadConfig | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    said: SaidRecord | None = None,
) -> Session:
    """Check, read and place a pair.

    Args:
        said: what a drafter with the frequent ids' head drafts; nothing is added to it.

    Raises:
        CheckpointError, PairError: a file or the combination is not what it must be (exit 6).
        DoesNotFitError: the device ran out of memory. DeviceLostError: it failed.
        KernelError: kernels that were requested fail. DriverError: torch has none for this card.
        UsageError: options this machine or family cannot take.
    """
    try:
        return _load(pair, config or LoadConfig(), progress, said)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
            raise DoesNotFitError(
                f"{pair.name} ran out of the device's memory while it was loaded",
                "another program may have taken some: dflash plan MODEL tells what fits now",
            ) from error
        if not is_lost(error):
            raise
        if NO_KERNELS in str(error):
            raise DriverError("the installed torch has no kernels for this card", FOR_OLD_CARDS) from error
        raise DeviceLostError(
            f"{pair.name} cannot be loaded, the device failed: {first_line(error)}",
            "start the program again; if it fails again, start the machine again, or use --device cpu",
        ) from error


def _load(
    pair: Pair, config: LoadConfig, progress: Callable[[LoadProgress], None] | None, said: SaidRecord | None
) -> Session:
    notify = progress or (lambda _: None)
    notify(LoadProgress("checking", 0.0))
    where = placement(config.device, config.dtype, config.bitsandbytes)
    make_current(torch.device(where.home))
    target_files = Checkpoint.open(pair.target)
    drafter_files = open_drafter(pair.drafter) if pair.drafter is not None and config.draft else None
    contract: PairFacts | None = None
    if drafter_files is not None:
        drafter_files = replace(drafter_files, config={**(pair.drafter_keys or {}), **drafter_files.config})
        if pair.adaptation is not None:
            drafter_files = adapted(drafter_files, pair.adaptation.path)
        contract = check_pair(
            target_files, drafter_files, allow_mismatch=config.allow_mismatch, generations=pair.generations
        )
    own, has_no_layer = None, False
    if contract is not None and config.mtp and not isinstance(contract.drafter, MTPConfig):
        own = _own_layer(pair, target_files, contract.drafter)
        has_no_layer = own is None
    facts = (contract.target if contract else TargetFacts.from_checkpoint(target_files)).quantized(config.quantize)
    if config.dtype == "auto" and where.device == "cpu":
        where = replace(where, dtype=DTYPES[cpu_dtype(facts.model, config.bitsandbytes, computes_bfloat16())])
    tokenizer = Tokenizer.load(target_files.source, wait=False)  # its process starts while the weights are read
    if tokenizer is not None:
        check_tokenizer_size(facts, tokenizer.vocab_size)
    context = _context(facts, contract, config.context)
    ids: Sequence[int] = ()
    if said is not None and tokenizer is not None and config.drafter_precision in FREQUENT_HEADS:
        ids = said.read(tokenizer.vocabulary)
    checked = CheckedPair(target_files, drafter_files, facts, contract, where, context, config, ids, own)
    runner, notices = load_runner(checked, lambda stage, fraction: notify(LoadProgress(stage, fraction)))
    if tokenizer is not None:
        tokenizer.check()
    notify(LoadProgress("ready", 1.0))
    if contract is not None:
        notices = (*contract.notices, *notices)
    if has_no_layer:
        notices = (*notices, NO_LAYER)
    loaded = replace(
        config,
        engine=runner.name,
        dtype=str(where.dtype).removeprefix("torch."),
        device=where.device,
        context=context,
        draft=contract is not None,
        mtp=own is not None,
        drafter_precision=runner.drafter_precision,
        offload="none" if config.offload not in OFFLOADS else config.offload,
    )
    if facts.model.quantization is not None and facts.model.quantization.remark:
        notices = (*notices, facts.model.quantization.remark)
    stored = kept_format(facts.model.quantization, runner.name)
    shown = _facts(pair, contract, loaded, stored, tokenizer is not None, notices)
    stop_ids = config_stop_ids(target_files.source) if tokenizer is None else tokenizer.stop_ids
    return Session(runner, shown, tokenizer, stop_ids)


def _own_layer(pair: Pair, target: Checkpoint, drafter: Drafter) -> tuple[MTPConfig, Checkpoint] | None:
    """Open and check the target's own layer, to draft beside another drafter; None where the files have none."""
    if not drafter.stored:
        raise UsageError("--mtp goes with a drafter; copies are looked up beside any", "take --drafter mtp")
    try:
        files = open_drafter(pair.target)
    except CheckpointError:  # of files that were read before: all that it can be about is the layer
        return None
    files = replace(files, config={**(pair.target_keys or {}), **files.config})
    layer = check_pair(target, files).drafter
    assert isinstance(layer, MTPConfig)
    return layer, files


def _context(facts: TargetFacts, contract: PairFacts | None, wanted: int | None) -> int:
    """Count tokens the session may hold: the smaller of both models' limits, or less on demand."""
    limit = facts.model.max_position_embeddings or DEFAULT_CONTEXT
    if contract is not None and contract.context is not None:
        limit = min(limit, contract.context)
    if wanted is None:
        return int(limit)
    if not 1 <= wanted <= limit:
        raise UsageError(f"context {wanted} is outside 1..{limit}")
    return wanted


def _facts(
    pair: Pair,
    contract: PairFacts | None,
    loaded: LoadConfig,
    stored: str | None,
    has_tokenizer: bool,
    notices: tuple[str, ...],
) -> SessionFacts:
    return SessionFacts(
        target=pair.target_label,
        drafter=pair.drafter_label if loaded.draft else None,
        block_size=contract.drafter.block_size if contract else 1,
        has_tokenizer=has_tokenizer,
        load=loaded,
        stored=stored,
        notices=notices,
        acceptance_band=pair.acceptance_band,
        trained_thinking=pair.thinking,
        generation_checked=contract is not None and bool(pair.generations) and not loaded.allow_mismatch,
        tuned_from=pair.tuned_from,
        adapted="" if contract is None or pair.adaptation is None else pair.adaptation.label,
    )
