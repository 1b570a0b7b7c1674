"""The fused engine's share of loading: whether it can run a pair here, and a runner ready to replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dflash_local.catalog import engine_rule
from dflash_local.config.fused_support import fused_refusal
from dflash_local.drafters.drafter import Drafter
from dflash_local.drafters.engines import BlockWeights, blocks_of
from dflash_local.drafters.with_mtp import drafters_of
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.engine.costs import measure_costs, record_cycles
from dflash_local.engine.cpu_threads import settle_torch
from dflash_local.engine.drafter_precision import (
    choose_precision,
    follow_precision,
    precision_of,
    release_head_copy,
    share_head,
)
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.held_sequences import KEPT_SNAPSHOTS
from dflash_local.engine.sampling import Sampler
from dflash_local.errors import DFlashError, KernelError
from dflash_local.kernels import nvrtc, triton_trial
from dflash_local.kernels.allocate import dtype_name
from dflash_local.kernels.jit import why_no_kernels
from dflash_local.kernels.timing import KernelTimer
from dflash_local.load_config import OFFLOADS
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused import weights as target_weights
from dflash_local.models.fused.kernel_choice import choose_configs, choose_experts, settle_rows, without_kernel
from dflash_local.models.fused.linear import GateUp, Linear
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import Front
from dflash_local.planner.load import Load
from dflash_local.planner.parameters import target_parameters
from dflash_local.planner.two_cards import even_split
from dflash_local.request import SamplingParams

SNAPSHOTS = KEPT_SNAPSHOTS + 1  # one more lives while the oldest is being replaced
EVERYTHING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=0)


def candidate(pair: CheckedPair) -> engine_rule.Candidate:
    """Return whether it takes a pair, and ``auto`` with it."""
    why = engine_rule.refusal(
        bitsandbytes=pair.where.bitsandbytes,
        dtype=str(pair.where.dtype).removeprefix("torch."),
        device=pair.where.home,
        target=fused_refusal(pair.facts.model),
        experts=not pair.facts.model.dense,
        drafter=refused_drafter(pair),
    )
    return engine_rule.fused(why, lambda: not why_slow(pair), pair.config.needs_fused)


def refused_drafter(pair: CheckedPair) -> str:
    """Return why it cannot run the drafter; empty where it can, or where there is none."""
    return "" if pair.contract is None else pair.contract.drafter.fused_refusal()


def devices(pair: CheckedPair) -> tuple[str, ...]:
    """Name the devices that it would load a pair onto: of several GPUs the first two."""
    return tuple(f"cuda:{card}" for card in pair.where.gpus[:2]) or (pair.where.home,)


def why_slow(pair: CheckedPair) -> str:
    """Return why its kernels do not run on one of a pair's devices, with what to install."""
    return next(filter(None, (why_not_on(device, pair.facts.model.dense) for device in devices(pair))), "")


def why_not_on(device: str, dense: bool) -> str:
    """Return why its kernels do not run on a device. A mixture's are compiled by NVRTC."""
    why = why_no_kernels(device)
    if why:
        return why
    fault: DFlashError | None = triton_trial.why_not(device)
    if fault is None and not dense:
        fault = nvrtc.why_not(torch.cuda.get_device_capability(torch.device(device)))
    return str(fault or "")


def load(pair: CheckedPair, progress: Callable[[str, float], None]) -> tuple[FusedRunner, tuple[str, ...]]:
    """Stream both models' weights, reserve the caches, and choose the products by measurement.

    Returns:
        the runner, and notices of the load.

    Raises:
        CheckpointError: a tensor is not what it must be. torch.OutOfMemoryError: it does not fit.
        KernelError: Triton is installed and cannot compile.
    """
    for device in devices(pair):
        fault = triton_trial.why_not(device) if device.startswith("cuda") and not why_no_kernels(device) else None
        if fault is not None:
            raise KernelError(fault.message, f"{fault.hint}; or use --engine reference")
    with triton_trial.named_compile_errors():
        return _load(pair, progress)


def _load(pair: CheckedPair, progress: Callable[[str, float], None]) -> tuple[FusedRunner, tuple[str, ...]]:
    facts, contract, config = pair.facts, pair.contract, pair.config
    draft = None if contract is None else contract.drafter.with_attention_factor(config.attention_factor)
    device, dtype = torch.device(pair.where.home), pair.where.dtype
    read = draft if draft is not None and draft.stored else None  # the drafter that has weights
    precision = None if read is None else precision_of(config.drafter_precision, facts.embedding_rows)
    offloaded = OFFLOADS.get(config.offload, ())
    notices: list[str] = []
    narrow = precision is not None and precision.weights == "8bit"
    sources = _drafters(pair, read)
    front = _front(pair)  # by what is free before anything is read, as it was planned
    parts: list[BlockWeights] = []
    if narrow:
        progress("drafter", 0.05)
        parts = _coded_weights(sources, device, dtype, notices)
    weights = target_weights.read_weights(
        pair.target_files,
        facts,
        device,
        dtype,
        lambda part: progress("target", 0.1 + 0.6 * part),
        host_embedding="embedding" in offloaded,
        front=front,
    )
    settle_torch(target_parameters(facts.model).total, device)
    block = 1 if draft is None else draft.block_size
    target = FusedTarget(
        weights,
        facts.model,
        pair.taps,
        pair.context,
        block,
        exact=config.exact,
        kv_cache=config.kv_cache,
        offloaded=offloaded,
        prefill_chunk=config.prefill_chunk,
    )
    if sources:
        progress("drafter", 0.7)
    parts = parts or [_block_weights(*each, device, dtype, notices) for each in sources]
    drafters = [
        blocks_of(each).bound(each, part, target, files, config.draft_window)
        for (each, files), part in zip(sources, parts, strict=True)
    ]
    parts.clear()  # what a coarser precision replaces is free then
    notices += [notice for each, _ in sources for notice in each.notices(config)]
    drafter, own = (*drafters, None, None)[:2]
    # What is chosen here; a coarser precision's products are chosen with it.
    stored: tuple[Linear | GateUp, ...] = () if narrow or drafter is None else drafter.products
    progress("measuring", 0.85)
    timer = KernelTimer()
    choose_configs(
        [*weights.measured, *stored], target.rows, lambda text, part: progress(text, 0.85 + 0.03 * part), timer
    )
    mixtures = [*weights.parts, *(mixture for each in drafters for mixture in each.mixtures)]
    choose_experts(mixtures, target.rows, config.exact, lambda text, part: progress(text, 0.88), timer)
    if config.exact:
        notices += settle_rows([*weights.products, weights.head], target.rows)
    runner = FusedRunner(target, drafter, pair.context, own)
    if drafter is not None:
        chosen = choose_precision(
            drafter,
            config.drafter_precision,
            target.rows,
            lambda text, part: progress(text, 0.88 + 0.02 * part),
            timer,
            pair.said,
        )
        runner.drafter_precision, runner.peak_before = chosen.name, chosen.peak_before
        notices += [chosen.notice] if chosen.fault else []
        if own is not None:
            follow_precision(own, drafter, chosen.name, target.rows, timer)
    notices += [timer.notice] if timer.notice else []
    notices += without_kernel([*weights.measured, *(product for each in drafters for product in each.products)])
    _reserve(runner, config.drafter_precision)
    measure_costs(runner, block, lambda part: progress("recording", 0.9 + 0.08 * part))
    progress("recording", 0.98)
    record_cycles(runner)
    return runner, tuple(notices)


def _front(pair: CheckedPair) -> Front | None:
    """Return the layers for the second GPU, where two are to be filled alike; None for one device."""
    cards = pair.where.gpus[:2]
    if len(cards) < 2:
        return None
    model, config = pair.facts.model, replace(pair.config, dtype=dtype_name(pair.where.dtype))
    drafter = drafters_of(model, None if pair.contract is None else pair.contract.drafter, config)
    load = Load.of("cuda", config, pair.context, 1 if drafter is None else drafter.block_size)
    return Front(even_split(model, drafter, load, free_bytes(cards)).layers, torch.device("cuda", cards[1]))


def free_bytes(cards: Sequence[int]) -> tuple[int, ...]:
    """Return what is free on each GPU of these indices."""
    return tuple(torch.cuda.mem_get_info(card)[0] for card in cards)


def _drafters(pair: CheckedPair, read: Drafter | None) -> list[tuple[Drafter, Checkpoint]]:
    """Return the drafter that has weights, with its files; behind it the target's own layer, where both draft."""
    if pair.drafter_files is None or read is None:
        return []
    return [(read, pair.drafter_files), *([] if pair.own is None else [pair.own])]


def _coded_weights(
    sources: Sequence[tuple[Drafter, Checkpoint]], device: torch.device, dtype: torch.dtype, notices: list[str]
) -> list[BlockWeights]:
    """Read drafters and code them. Both forms lie on the device for a while, so nothing else may need it yet."""
    parts = [_block_weights(*each, device, dtype, notices).coded() for each in sources]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return parts


def _block_weights(
    config: Drafter, files: Checkpoint, device: torch.device, dtype: torch.dtype, notices: list[str]
) -> BlockWeights:
    return blocks_of(config).read_weights(files, config, device, dtype, notices.append)


def _reserve(runner: FusedRunner, wanted: str) -> None:
    """Reserve; a copy of the head that was only to save time gives way where there is no room for both."""
    try:
        reserve(runner)
    except torch.OutOfMemoryError:
        drafter = runner.proposer
        if drafter is None or wanted != "auto" or drafter.head is drafter.stored_head:
            raise
        runner.drafter_precision = release_head_copy(drafter, runner.drafter_precision)
        if runner.own is not None:
            share_head(runner.own, drafter)
        torch.cuda.empty_cache()
        reserve(runner)


@torch.inference_mode()
def reserve(runner: FusedRunner) -> None:
    """Run a full prompt chunk, keep its snapshots and choose a block with every filter; then forget it all.

    So that nothing runs out in mid-chat: torch's allocator keeps what it has held once.

    Raises:
        torch.OutOfMemoryError: the planned context does not fit.
    """
    if runner.target.device.type != "cuda":
        return
    ids = [0] * min(runner.target.prefill_chunk, runner.context)
    prompt = torch.zeros(len(ids), dtype=torch.long, device=runner.target.device)
    sampler = Sampler(EVERYTHING, 0, runner.target.vocab_size, prompt)
    runner.begin(sampler, frozenset(), runner.target.rows, runner.proposer is not None)
    for _ in runner.prefill(ids, 0):
        pass
    kept = [runner.snapshot() for _ in range(SNAPSHOTS)]
    logits = runner.target.logits.zero_()
    noise = sampler.noise(len(ids), len(logits))
    sampler.choose(logits, runner.progress.tokens[1:], noise)
    del kept, noise
    runner.restart(0, None)
