"""The plan of a target that drafts with its own layer, against the tensors that the fused engine holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

pytest.importorskip("torch", reason="holds the planner to the engine, and torch is not installed here")

import torch  # noqa: E402

from dflash_local.catalog.shapes import shape  # noqa: E402
from dflash_local.config.read_model import read_model  # noqa: E402
from dflash_local.drafters.kinds import drafter_of_shape  # noqa: E402
from dflash_local.drafters.mtp.fused import MTPBlocks, MTPWeights  # noqa: E402
from dflash_local.drafters.mtp.layout import MTPConfig  # noqa: E402
from dflash_local.engine import drafter_precision  # noqa: E402
from dflash_local.engine.fused_runner import FusedRunner  # noqa: E402
from dflash_local.engine.load_pair import load  # noqa: E402
from dflash_local.load_config import DRAFTER_PRECISIONS, LoadConfig  # noqa: E402
from dflash_local.models.fused import linear  # noqa: E402
from dflash_local.models.fused import weights as target_weights  # noqa: E402
from dflash_local.models.fused.target import FusedTarget  # noqa: E402
from dflash_local.planner import fused_memory  # noqa: E402
from dflash_local.planner.load import Load  # noqa: E402
from dflash_local.planner.machine import named  # noqa: E402
from dflash_local.planner.plan import plan  # noqa: E402
from tests.mtp_checkpoints import own_pair, save_target  # noqa: E402
from tests.planner.test_fused_ledger import META, held, host_copies, lines, standing  # noqa: E402
from tests.quantized_checkpoints import SIZES  # noqa: E402

WAYS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "drafter_precision": "8bit", "kv_cache": "int8"},
    {"dtype": "bfloat16", "drafter_precision": "8bit-drafter", "exact": True},
]
APART: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}  # no joined shared expert


@pytest.mark.parametrize("way", WAYS, ids=["full", "eight bits", "exact"])
@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_5", {}), ("qwen3_5_moe", {}), ("qwen3_5_moe", APART)], ids=["dense", "moe", "apart"]
)
def test_a_loaded_layer_holds_what_the_ledger_says(
    family: str, changes: dict[str, Any], way: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_target(family, tmp_path / "target", **SIZES, **changes)
    wanted = LoadConfig(device="cpu", engine="fused", context=300, **way)
    runner = load(own_pair(folder), wanted).runner
    assert isinstance(runner, FusedRunner) and isinstance(runner.proposer, MTPBlocks)
    config = runner.proposer.config
    request = Load.of("cpu", wanted, 300, config.block_size)
    found = lines(runner.target.config, config, request)
    assert standing(found) == held(runner) - host_copies(runner)
    runner.proposer.length = 7
    assert config.snapshot_bytes(fused_memory.engine_spec(config, request)) == held(runner.proposer.snapshot())


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-35B-A3B"])
@pytest.mark.parametrize("precision", ["full", "8bit", "frequent", "8bit-frequent"])
def test_published_layers_are_planned_to_the_byte(name: str, precision: str) -> None:
    known = shape(name) or {}
    model, config = read_model(known, name), drafter_of_shape(known, name)
    assert isinstance(config, MTPConfig)
    weights = target_weights.allocate(model, "model.", model.vocab_size, META, torch.bfloat16)
    target = FusedTarget(weights, model, config.taps, 4099, config.block_size)
    drafter = MTPBlocks(config, MTPWeights.allocate(config, META, torch.bfloat16).finish(), target)
    with mock.patch.object(linear, "quantize"):  # no memory, no numbers
        drafter_precision.apply(cast(Any, drafter), DRAFTER_PRECISIONS[precision])
    runner = FusedRunner(target, cast(Any, drafter), 4099)
    load_config = LoadConfig(drafter_precision=precision)
    found = lines(model, config, Load.of("cuda", load_config, 4099, config.block_size))
    assert standing(found) == held(runner) - host_copies(runner)
    assert found["drafter KV"] == held(*drafter._attention.cache)
    experts = [mixture.experts for mixture in drafter.mixtures]
    assert held(drafter.matrices, experts) < found["drafter weights"] < 1.02 * held(drafter.matrices, experts)
    traffic = config.traffic(model, fused_memory.engine_spec(config, Load.of("cuda", load_config, 4099, 5)))
    read = sum(each.bytes * count for each, count in traffic.products.items())
    read += sum(each.product.bytes * (each.top_k + each.always) * count for each, count in traffic.experts.items())
    assert read == drafter.block_bytes(0) + drafter.inject_bytes()


def test_on_a_card_the_fused_engine_is_planned() -> None:
    known = shape("Qwen/Qwen3.5-9B") or {}
    model, config = read_model(known, "x"), drafter_of_shape(known, "x")
    found = plan(model, config, named("RTX 5090", 32), LoadConfig(context=8192))
    assert found.fits and found.engine == "fused" and found.block_size == 5
