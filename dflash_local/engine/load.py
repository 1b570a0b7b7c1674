"""From two folders to a ``Session``: contract first, then weights, then caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_local.catalog import engine_rule
from dflash_local.catalog.bundled import Pair
from dflash_local.chat.stop_ids import stop_ids
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.engine.load_fused import chosen_engine, load_fused
from dflash_local.engine.proposer import DFlashProposer
from dflash_local.engine.reference import ReferenceRunner
from dflash_local.engine.runner import Runner
from dflash_local.engine.session import Session
from dflash_local.engine.torch_switches import settle_torch
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.events import LoadProgress
from dflash_local.loaded import SessionFacts
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter import Drafter, drafter_dtype
from dflash_local.models.load_target import Placement, load_target, placement
from dflash_local.models.pair import PairFacts, check_pair, check_tokenizer_size
from dflash_local.models.target_facts import TargetFacts
from dflash_local.models.transformers_target import TransformersTarget

DEFAULT_CONTEXT = 4096  # for a target whose configuration names none


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a pair is loaded.

    Attributes:
        dtype: auto, float32, bfloat16 or float16. device: auto, cpu, cuda, cuda:N, mps, or balanced
            (spread over all GPUs). quantize: nf4 or int8 through bitsandbytes, or None.
        allow_mismatch: load a pair whose contract fails; acceptance may be near 1.
        context: tokens the session may hold; None takes the target's own limit.
        engine: auto, fused or reference. draft: False loads the target alone.
        draft_window: context rows the drafter looks back on.
        attention_factor: overrides the drafter's YaRN amplitude (ENGINE 1.6).
        exact: the logits of a row are the same in every bit with and without drafting, in any dtype.
        draft_side: one of ``engine.draft_side.WORDS``; the reference engine always drafts in full.
        kv_cache: auto (the model's dtype) or fp8, half of the memory; the fused engine's, and it changes replies.
    """

    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    allow_mismatch: bool = False
    context: int | None = None
    engine: str = "auto"
    draft: bool = True
    draft_window: int | None = None
    attention_factor: float | None = None
    exact: bool = False
    draft_side: str = "auto"
    kv_cache: str = "auto"


def load(
    pair: Pair, options: LoadOptions | None = None, progress: Callable[[LoadProgress], None] | None = None
) -> Session:
    """Check, read and place a pair.

    Raises:
        CheckpointError, PairError: a file or the combination is not what it must be (exit 6).
        DoesNotFitError: the device ran out of memory.
        UsageError: options this machine or family cannot take.
    """
    try:
        return _load(pair, options or LoadOptions(), progress)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DoesNotFitError(
            f"{pair.name} ran out of the device's memory while it was loaded",
            "another program may have taken some: dflash plan MODEL tells what fits now",
        ) from error


def _load(pair: Pair, options: LoadOptions, progress: Callable[[LoadProgress], None] | None) -> Session:
    say = progress or (lambda _: None)
    say(LoadProgress("checking", 0.0))
    where = placement(options.device, options.dtype, options.quantize)
    target_files = Checkpoint.open(pair.target)
    drafter_files = Checkpoint.open(pair.drafter) if pair.drafter is not None and options.draft else None
    contract: PairFacts | None = None
    if drafter_files is not None:
        contract = check_pair(
            target_files, drafter_files, allow_mismatch=options.allow_mismatch, generations=pair.generations
        )
    facts = contract.target if contract else TargetFacts.from_checkpoint(target_files)
    tokenizer = Tokenizer.load(pair.target, wait=False)  # its process starts while the weights are read
    if tokenizer is not None:
        check_tokenizer_size(facts, tokenizer.vocab_size)
    context = _context(facts, contract, options.context)
    runner: Runner
    if (
        chosen_engine(options.engine, facts, contract, where, engine_rule.fused_only(options.exact, options.kv_cache))
        == "fused"
    ):
        runner, notices = load_fused(
            target_files,
            drafter_files,
            facts,
            contract,
            where,
            context,
            attention_factor=options.attention_factor,
            draft_window=options.draft_window,
            exact=options.exact,
            draft_side=options.draft_side,
            kv_cache=options.kv_cache,
            say=lambda stage, fraction: say(LoadProgress(stage, fraction)),
        )
    else:
        runner, notices = _load_reference(target_files, drafter_files, facts, contract, where, context, options, say)
    if tokenizer is not None:
        tokenizer.check()
    say(LoadProgress("ready", 1.0))
    if contract is not None:
        notices = (*contract.notices, *notices)
    shown = _facts(pair, runner, contract, where, context, tokenizer is not None, notices, options.kv_cache)
    return Session(runner, shown, tokenizer, stop_ids(pair.target))


def _load_reference(
    target_files: Checkpoint,
    drafter_files: Checkpoint | None,
    facts: TargetFacts,
    contract: PairFacts | None,
    where: Placement,
    context: int,
    options: LoadOptions,
    say: Callable[[LoadProgress], None],
) -> tuple[ReferenceRunner, tuple[str, ...]]:
    """The target through transformers, the drafter in plain PyTorch; and notices of the load."""
    say(LoadProgress("target", 0.1))
    model = load_target(target_files, facts, where)
    settle_torch(sum(p.numel() for p in model.parameters()), next(model.parameters()).device)
    target = TransformersTarget(model, contract.drafter.taps if contract else ())
    if contract is None or drafter_files is None:
        return ReferenceRunner(target, None, context), ()
    say(LoadProgress("drafter", 0.8))
    drafter = Drafter.load(
        drafter_files,
        device=target.device,
        dtype=drafter_dtype(target.dtype),
        attention_factor=options.attention_factor,
    )
    proposer = DFlashProposer(drafter, target, options.draft_window)
    return ReferenceRunner(target, proposer, context), drafter.notices


def _context(facts: TargetFacts, contract: PairFacts | None, wanted: int | None) -> int:
    """Tokens the session may hold: the smaller of both models' limits, or less on demand."""
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
    runner: Runner,
    contract: PairFacts | None,
    where: Placement,
    context: int,
    has_tokenizer: bool,
    notices: tuple[str, ...],
    kv_cache: str,
) -> SessionFacts:
    drafter = f"{pair.name} (bundled)" if pair.bundled else str(pair.drafter)
    return SessionFacts(
        target=pair.name if pair.bundled else str(pair.target),
        drafter=None if runner.proposer is None else drafter,
        engine=runner.name,
        dtype=where.quantize or str(where.dtype).removeprefix("torch."),
        device=where.device,
        block_size=contract.drafter.block_size if contract else 1,
        context=context,
        has_tokenizer=has_tokenizer,
        notices=notices,
        acceptance_band=pair.acceptance_band,
        exact=runner.exact,
        kv_cache=kv_cache,
        draft_side=runner.draft_side,
    )
