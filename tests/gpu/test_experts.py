"""Mixtures of experts on a GPU: kernels against PyTorch's products, rows by bits, whole tiny models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.engine.runner import Cycle
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels import expert_gemm
from dflash_local.kernels.expert_prefill import experts_prefill
from dflash_local.kernels.experts import ExpertWeight, Routing, RoutingOptions, experts_down, experts_swiglu, route
from dflash_local.kernels.fragment_packing import PLAIN, FragmentWeight
from dflash_local.kernels.random_weight import random_coded
from dflash_local.kernels.split_kv import device_properties
from dflash_local.models.fused.expert_choice import MixtureLayer, choose_expert_kernels
from dflash_local.models.fused.kernel_choice import choose_configs, choose_experts, settle_rows
from dflash_local.models.fused.routed_experts import ExpertBlock, ExpertKernels, Matrices, mixture_of
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import TargetWeights, read_weights
from dflash_local.models.target_facts import TargetFacts
from dflash_local.request import SamplingParams
from tests.both_engines import facts_of
from tests.engine_sessions import random_prompt
from tests.expert_pairs import sizes_of
from tests.families import save_model
from tests.kernels import few_rows
from tests.kernels.few_rows import FORMATS

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
HIDDEN, SIZE, EXPERTS, TOP_K = 1024, 256, 32, 4
NAMES = [each for each in FORMATS if each not in ("int8, groups of 128 with zeros", "fp8, rows", "Q5_1")]
random, empty = partial(few_rows.random, device="cuda"), partial(few_rows.empty, device="cuda")
OPTIONS = RoutingOptions(EXPERTS, shared=True, shared_gate=True)
MIXTURE = mixture_of(OPTIONS, TOP_K + 1)


def matrices(name: str) -> Matrices:
    """Random ones of all experts, a shared one among them."""
    kind, found = FORMATS[name], []
    for features, columns in ((2 * SIZE, HIDDEN), (HIDDEN, SIZE)):
        generator, shape = torch.Generator("cuda").manual_seed(features), ((EXPERTS + 1) * features, columns)
        if kind == PLAIN:
            plain = torch.randn(shape, device="cuda", generator=generator).mul_(columns**-0.5).to(BF16)
            found.append(ExpertWeight(plain, EXPERTS + 1))
        else:
            found.append(ExpertWeight(FragmentWeight.of(random_coded(kind, shape, generator)), EXPERTS + 1))
    return Matrices(*found)


def run(
    kernels: ExpertKernels, weights: Matrices, x: torch.Tensor, logits: torch.Tensor, residual: torch.Tensor | None
) -> tuple[Routing, torch.Tensor, torch.Tensor]:
    """The routing, the rows between the products, and their result."""
    rows, slots = len(x), kernels.mixture.slots
    routing = Routing(
        torch.full((rows, slots), float("nan"), device="cuda"),
        torch.full((rows, slots), -1, device="cuda", dtype=torch.int32),
    )
    lists = torch.full((8, kernels.mixture.list_words), -1, device="cuda", dtype=torch.int32)
    between = empty(rows, slots, SIZE)
    out = torch.empty_like(x) if residual is None else residual.clone()
    block = ExpertBlock(routing, lists, between)
    kernels.run(x, logits, weights, block, out, None if residual is None else out)
    return routing, between, out


def in_launches(
    rows: int, kernels: ExpertKernels, weights: Matrices, *tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``run`` gives but the routing, of so many rows at a time."""
    found = [run(kernels, weights, *part)[1:] for part in zip(*(each.split(rows) for each in tensors))]
    return torch.cat([between for between, _ in found]), torch.cat([out for _, out in found])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_right_and_a_row_has_its_bits_among_any_others(name: str) -> None:
    weights = matrices(name)
    (kernels,) = choose_expert_kernels([MixtureLayer(MIXTURE, weights, "silu")], 16, exact=True)
    x, logits, residual = random(40, HIDDEN), random(40, EXPERTS + 1, seed=1), random(40, HIDDEN, seed=2)
    logits[:, 3] = 8  # every row's, like the shared one: more than eight rows of an expert
    logits[5, :EXPERTS] = 0.25  # a tie of all
    routing, between, out = run(kernels, weights, x, logits, residual)
    wanted = route(logits, OPTIONS, Routing(*(torch.empty_like(each) for each in routing)))
    assert torch.equal(routing.experts, wanted.experts)
    assert torch.allclose(routing.weights, wanted.weights, rtol=1e-2)
    assert error(between, experts_swiglu(x, weights.gate_up, routing, torch.empty_like(between), "silu")) < 1e-2
    assert error(out, experts_down(between, weights.down, routing, torch.empty_like(out), residual)) < 5e-3
    prompt = experts_prefill(x, weights.gate_up, weights.down, routing, "silu") + residual
    assert error(prompt, out) < 1e-2
    for rows in ([0], [5, 39], list(range(30, 38)), list(range(15, -1, -1)), [7, 3, 7]):
        _, some, results = run(kernels, weights, x[rows], logits[rows], residual[rows])
        assert torch.equal(some, between[rows]) and torch.equal(results, out[rows]), rows


@pytest.mark.parametrize("name", NAMES)
def test_each_config_gives_a_row_its_bits_in_launches_of_any_size(name: str) -> None:
    weights = matrices(name)
    shared_memory = device_properties(torch.device("cuda", 0)).shared_memory
    first = list(expert_gemm.candidates(True, weights.gate_up, MIXTURE, 16, shared_memory))
    second = list(expert_gemm.candidates(False, weights.down, MIXTURE, 16, shared_memory))
    x, logits, residual = random(240, HIDDEN), random(240, EXPERTS + 1, seed=1), random(240, HIDDEN, seed=2)
    for i in range(max(len(first), len(second))):
        pair = first[i % len(first)], second[i % len(second)]
        kernels = ExpertKernels(MIXTURE, dict.fromkeys((8, 16), pair))  # type: ignore[arg-type]
        want = in_launches(16, kernels, weights, x, logits, residual)
        for rows in (1, 8):
            found = in_launches(rows, kernels, weights, x, logits, residual)
            assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1]), (rows, pair)


def test_a_recorded_block_follows_its_rows_experts() -> None:
    weights = matrices("int4")
    (kernels,) = choose_expert_kernels([MixtureLayer(MIXTURE, weights, "silu")], 16)
    x, logits = random(16, HIDDEN), random(16, EXPERTS + 1)
    run(kernels, weights, x, logits, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(kernels, weights, x, logits, None)
    for seed in range(20):
        logits.copy_(random(16, EXPERTS + 1, seed=seed))
        graph.replay()
        recorded = found[2].clone()
        assert torch.equal(run(kernels, weights, x, logits, None)[2], recorded)


def read(folder: Path, rows: int, exact: bool) -> tuple[TargetWeights, TargetFacts]:
    checkpoint, facts = facts_of(folder)
    weights = read_weights(checkpoint, facts, torch.device("cuda"), BF16)
    choose_configs(weights.products, rows)
    choose_experts(weights.parts, rows, exact)
    if exact:
        settle_rows([*weights.products, weights.head], rows)
    return weights, facts


def test_counts_of_experts_come_to_the_host_without_a_wait(tmp_path: Path) -> None:
    """Of cycles that are recorded and replayed: what ``route`` of the same rows says, whatever their number."""
    weights, facts = read(save_model("qwen3_moe", tmp_path, **sizes_of("qwen3_moe", 256)), 16, exact=False)
    target, prompt = FusedTarget(weights, facts.model, (0, 2), 900, 16), random_prompt(11)
    runner = FusedRunner(target, OracleDrafter(target, [*prompt, *random_prompt(800)]), 900)  # type: ignore[arg-type]
    sampler = Sampler(SamplingParams(), 1, target.vocab_size, torch.tensor(prompt, device="cuda"))
    runner.begin(sampler, frozenset(), 16, True)
    lengths = (1, 4, 16)
    with torch.inference_mode():
        for _ in runner.prefill(prompt, 0):
            pass
        for rows in [*lengths, *lengths]:  # the first runs compile and record
            runner.set_block(rows)
            runner.launch()
        runner.collect()
        cycles: list[Cycle] = []
        try:
            torch.cuda.set_sync_debug_mode("error")
            for index in range(120):
                runner.set_block(lengths[index // 40])
                runner.launch()
                cycles += runner.collect()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen = {rows: [each.experts for each in cycles if each.rows == rows and each.experts] for rows in lengths}
        assert all(len(counts) >= 2 for counts in seen.values()) and set(seen[1]) == {2.0}
        assert 2 < min(seen[4]) and sum(seen[16]) / len(seen[16]) > sum(seen[4]) / len(seen[4])
        for rows in lengths:
            target.block(rows, 2048, True)
            last = target.mixtures[-1]
            taken = last._routed.experts[:rows].unique()  # room that the layers use in turn
            assert target.distinct_of(rows)[-1] == len(taken)
