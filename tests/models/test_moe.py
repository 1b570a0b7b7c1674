"""A mixture of experts in the fused engine: against transformers' own, and in the corners of routing."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.adapt.live_memory import LiveMemory
from dflash_local.config.features import MoEConfig
from dflash_local.kernels import expert_prefill
from dflash_local.kernels.allocate import Tensors, dtype_name
from dflash_local.kernels.delta_step import CycleState
from dflash_local.kernels.experts import ExpertWeight, Routing, RoutingOptions, route
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.layout.linear import DECODED_SLICE, unquantized
from dflash_local.layout.moe import MoELayout
from dflash_local.layout.part_layout import EngineSpec, WeightSpec
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.moe import MoE, MoEWeights
from dflash_local.models.fused.part import RunState
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weight_tensors import WeightTensors
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.families import HIDDEN, random_model, save_model
from tests.fused_models import fused_target

FAMILIES = ("qwen3_moe", "qwen3_5_moe")
EXPERTS, CHOSEN, INNER, ROWS = 8, 2, 16, 16
CPU = torch.device("cpu")


def random_rows(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def target_of(folder: Path) -> FusedTarget:
    checkpoint = Checkpoint.open(folder)
    facts = TargetFacts.from_checkpoint(checkpoint)
    return FusedTarget(read_weights(checkpoint, facts, CPU, torch.float32), facts.model, (0, 2), 64, ROWS)


def mixture_of(target: FusedTarget, layer: int = 1) -> MoE:
    part = target.layers[layer].mlp
    assert isinstance(part, MoE)
    return part


def stacked(weight: ExpertWeight) -> torch.Tensor:
    """The plain matrices [E, N, K] of all experts, over their memory."""
    assert isinstance(weight.weight, torch.Tensor)
    return weight.weight.view(weight.experts, weight.out_features, weight.in_features)


def no_routing(rows: int, slots: int = CHOSEN) -> Routing:
    """Room for what rows take."""
    return Routing(torch.empty(rows, slots), torch.empty(rows, slots, dtype=torch.int32))


def by_both(part: MoE, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a block and of a prompt, each alone and added."""
    out = torch.full_like(x, torch.nan)
    added = x.clone()
    block = [part.block(x, out, None), part.block(x, added, added).sub(x)]
    return [*block, part.prefill(x), part.prefill(x, x.clone()).sub(x)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("qwen3_moe", {"norm_topk_prob": False}), ("qwen3_5_moe", {})]
)
def test_a_part_is_transformers_own(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    target = target_of(save_model(family, tmp_path, **changes))
    model = random_model(family, **changes)
    for layer in range(4):
        own = model.model.layers[layer].mlp
        for rows in (1, 2, 7, ROWS):
            x = random_rows(rows, layer)
            want = own(x.unsqueeze(0))[0]
            for found in by_both(mixture_of(target, layer), x):
                assert torch.allclose(found, want, atol=2e-6)
    many = random_rows(200)
    assert torch.allclose(mixture_of(target, 3).prefill(many), own(many.unsqueeze(0))[0], atol=2e-6)


def test_of_equally_likely_experts_the_first_are_taken() -> None:
    logits = torch.zeros(3, EXPERTS)
    logits[1, 5] = 1.0
    logits[2, [2, 4, 6]] = 3.0
    found = route(logits, RoutingOptions(EXPERTS), no_routing(3))
    assert found.experts.tolist() == [[0, 1], [5, 0], [2, 4]]
    assert found.weights[[0, 2]].tolist() == [[0.5, 0.5]] * 2
    assert found.weights[1].tolist() == pytest.approx([torch.e / (torch.e + 1), 1 / (torch.e + 1)])
    shares = route(logits, RoutingOptions(EXPERTS, norm_topk_prob=False), no_routing(3)).weights
    assert shares[0].tolist() == [1 / EXPERTS] * 2, "shares of all experts, not of the chosen"


@torch.no_grad()
@pytest.mark.parametrize("width", [16, 24])
def test_a_shared_expert_is_one_of_the_others_where_it_is_as_wide(width: int, tmp_path: Path) -> None:
    changes = {"shared_expert_intermediate_size": width}
    target = target_of(save_model("qwen3_5_moe", tmp_path, **changes))
    own = random_model("qwen3_5_moe", **changes).model.layers[1].mlp
    part = mixture_of(target)
    joined = width == INNER
    assert part.weights.experts.joined == joined == (part.weights.shared is None)
    assert part.weights.experts.down.experts == EXPERTS + joined
    x = random_rows(7)
    for found in by_both(part, x):
        assert torch.allclose(found, own(x.unsqueeze(0))[0], atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_that_nobody_picks_is_not_read(family: str, tmp_path: Path) -> None:
    part = mixture_of(target_of(save_model(family, tmp_path)))
    x = random_rows(ROWS).abs()  # a row of the router of -100 gives the least of all logits
    router = part.weights.router.products[0].weight
    assert isinstance(router, torch.Tensor)
    router[3] = -100.0
    want = by_both(part, x)
    matrices = part.weights.experts
    for weight in (matrices.gate_up, matrices.down):
        stacked(weight)[3] = torch.nan
    for found, before in zip(by_both(part, x), want, strict=True):
        assert torch.equal(found, before) and bool(found.isfinite().all())
    router[3] = 100.0
    assert all(bool(found.isnan().all()) for found in by_both(part, x)), "one that all pick is read"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_of_one_row_has_the_bits_of_a_longer_ones_in_exact_mode(family: str) -> None:
    target = fused_target(family, 64, exact=True)
    target.clear()
    target.prefill(torch.arange(5, 16), False)
    alone = target.verify(torch.tensor([3]), False).hidden[0]
    among = target.verify(torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), False).hidden[0]
    assert torch.equal(alone, among)
    assert torch.equal(target.verify(torch.tensor([3, 3, 3]), False).hidden[0], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        MoEConfig(32, 4, 96, shared_intermediate_size=96, shared_gate=True),
        MoEConfig(8, 1, 1024),
        MoEConfig(256, 8, 16),
        MoEConfig(8, 2, 16, shared_intermediate_size=512, shared_gate=True),
    ],
    ids=["results", "one expert", "order", "shared expert"],
)
def test_a_prompt_takes_what_the_layout_says(
    config: MoEConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allocated for kernels that are not launched; each of these has its fullest moment somewhere else."""
    monkeypatch.setattr(expert_prefill, "_takes", lambda *_: True)
    monkeypatch.setattr(expert_prefill, "runs_kernels", lambda _: True)
    monkeypatch.setattr(expert_prefill, "device_properties", lambda _: DeviceProperties(2**17, 16, (8, 0)))
    for kernel in ("_products_kernel", "_weighed_sum_kernel"):
        monkeypatch.setattr(expert_prefill, kernel, defaultdict(lambda: lambda *_, **__: None))
    hidden, rows, kind, layout = 256, 512, dtype_name(dtype), MoELayout(config)
    spec, run = WeightSpec(hidden, kind, False, unquantized), EngineSpec(kind, 64)
    source = WeightTensors(Tensors(layout.weights("mlp", spec), CPU), spec, 1e-6)
    weights = MoEWeights.of(config, "mlp", source)
    weights.randomize(torch.Generator().manual_seed(0))
    router = weights.router.products[0].weight
    assert isinstance(router, torch.Tensor)
    router[:] = -1.0
    router[: layout.top_k] = 1.0
    start = torch.zeros(1, dtype=torch.int32)
    buffers = Tensors([*layout.activations("target", run), *layout.state("mlp", run)], CPU)
    part = weights.bind("mlp", RunState("target", buffers, run, start, CycleState(start, start)))
    x = torch.rand(rows, hidden).to(dtype)
    with LiveMemory() as memory:
        part.prefill(x)
    assert memory.peak == pytest.approx(layout.prefill_bytes(rows, hidden, dtype.itemsize), rel=0.01)


def test_more_rows_decode_more_experts_at_a_time() -> None:
    """Of gpt-oss-20b, 2,880 wide inside and out; a shared expert of another width has products of its own."""
    layout = MoELayout(MoEConfig(32, 4, 2880))
    for rows, experts in ((100, 2), (2048, 2), (4096, 4), (8192, 4)):  # of 8,192 rows half go at a time
        assert layout.decoded_at_once(rows, 2880, 2) == experts * 2 * 2880 * 2880, rows
    assert MoELayout(MoEConfig(8, 2, 16, shared_intermediate_size=16)).decoded_at_once(100, 64, 2) == 9 * 2 * 16 * 64
    assert MoELayout(MoEConfig(8, 2, 16, shared_intermediate_size=32)).decoded_at_once(100, 64, 2) == DECODED_SLICE


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_only_rows_without_a_token_take_are_not_read(family: str) -> None:
    """In exact mode every block has all rows; the count of experts is of those that hold tokens."""
    target = fused_target(family, 64, exact=True)
    target.clear()
    target.prefill(torch.arange(5, 16), False)
    part = mixture_of(target)
    target.verify(torch.tensor([3]), False)
    assert part.distinct_experts is not None and int(part.distinct_experts[0]) == CHOSEN
    part.fixed_logits = torch.eye(EXPERTS + 1)[:, : EXPERTS + part.weights.config.shared_gate].repeat(2, 1)
    target.verify(torch.tensor([3, 1, 4]), False)
    assert int(part.distinct_experts[0]) == 3, "each row's own, and the first"
    assert target.distinct_of(3)[target.mixtures.index(part)] == 3
