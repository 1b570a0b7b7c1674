"""The reference engine's share of loading: the target through transformers, the drafter in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dflash_local.catalog import engine_rule
from dflash_local.drafters.engines import OwnProposer, Proposer, proposer_of
from dflash_local.drafters.mtp.reference import MTPProposer
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.engine.costs import measure_cpu_costs, measure_plain
from dflash_local.engine.cpu_threads import SMALL_MODEL, CpuThreads, end_team, settle_torch
from dflash_local.engine.reference_runner import ReferenceRunner
from dflash_local.layout.cycle import PREFILL_CHUNK
from dflash_local.models.load_target import load_target
from dflash_local.models.packed_linear import can_pack, pack_linears
from dflash_local.models.transformers_target import TransformersTarget


def candidate(pair: CheckedPair) -> engine_rule.Candidate:
    """Return that it takes every pair, but not every option."""
    return engine_rule.reference(pair.config.needs_fused)


def load(pair: CheckedPair, progress: Callable[[str, float], None]) -> tuple[ReferenceRunner, tuple[str, ...]]:
    """Return the runner, and notices of the load."""
    progress("target", 0.1)
    model = load_target(pair.target_files, pair.facts, pair.where)
    parameters, device = sum(p.numel() for p in model.parameters()), next(model.parameters()).device
    settle_torch(parameters, device)
    large = parameters >= SMALL_MODEL  # what caches hold gains nothing by a layout, but rows alone need it in bfloat16
    packed = can_pack(device, pair.where.dtype) and (large or pair.where.dtype == torch.bfloat16)
    if packed:
        pack_linears(model)
    threads = CpuThreads() if packed and large else None
    target = TransformersTarget(model, pair.taps, prefill_chunk=pair.config.prefill_chunk or PREFILL_CHUNK)
    proposer: Proposer | None = None
    own: OwnProposer | None = None
    notices: tuple[str, ...] = ()
    if pair.contract is not None and pair.drafter_files is not None and pair.contract.drafter.stored:
        progress("drafter", 0.8)
        proposer, notices = proposer_of(pair.contract.drafter).load(pair.drafter_files, target, pair.config, packed)
        precision = pair.config.drafter_precision
        if precision not in ("auto", "full"):
            notices += (f"drafts are computed in full: --drafter-precision {precision} is of the fused engine",)
        if pair.own is not None:
            own, more = MTPProposer.load(pair.own[1], target, pair.config, packed)
            notices += more
    runner = ReferenceRunner(target, proposer, pair.context, threads, own)
    if pair.contract is not None and pair.contract.drafter.passes > 1:
        runner.wait_ms = math.inf
    if pair.contract is not None and packed and large:
        measure_cpu_costs(runner, pair.contract.block_size)
    if pair.contract is not None:
        measure_plain(runner)
    end_team()
    return runner, notices
