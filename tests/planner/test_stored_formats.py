"""Plans of quantised checkpoints by their configuration alone: stored bytes where they stay, decoded ones elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.config.features import ModelConfig
from dflash_local.config.quantizers import USUAL
from dflash_local.layout import cycle
from dflash_local.layout.linear import DECODED_SLICE, DEQUANTIZED_BYTES, DEQUANTIZED_SLICE
from dflash_local.load_config import LoadConfig
from dflash_local.planner import formats
from dflash_local.planner.ledger import GIB
from dflash_local.planner.machine import named
from dflash_local.planner.plan import plan
from tests.drafter_configs import published_target

SHAPE = "Qwen/Qwen3.5-9B"


def target(repo: str, settings: Any) -> ModelConfig:
    return published_target(repo, quantization_config=settings)


def test_the_fused_plan_counts_stored_bytes_and_the_reference_plan_decoded_ones() -> None:
    """What fits a 12 GB card as it is stored does not fit it decoded."""
    model, gpu = target("Qwen/Qwen3.5-9B", USUAL["int4-g128"]), named("RTX 4070", 12)
    fused = plan(model, None, gpu, LoadConfig(context=8192))
    decoded = plan(model, None, gpu, LoadConfig(context=8192, engine="reference"))
    assert (fused.engine, fused.fits, fused.format) == ("fused", True, "int4 g128")
    assert (decoded.engine, decoded.fits, decoded.format) == ("reference", False, "bfloat16")
    held = {line.name: line.bytes or 0 for line in fused.ledger.lines}
    plain = {line.name: line.bytes or 0 for line in decoded.ledger.lines}
    assert (held["target weights"] + held["head"]) / GIB == pytest.approx(7.1, abs=0.1)
    assert (plain["target weights"] + plain["head"]) / GIB == pytest.approx(16.7, abs=0.1)
    assert fused.as_dict()["stored"] == "int4 g128" and decoded.as_dict()["stored"] is None


def test_room_to_decode_a_slice_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycle, "CODED_CHUNK_NUMBERS", 0)  # chunks of as many tokens, quantised or not
    models, gpu = (target(SHAPE, USUAL["fp8"]), target(SHAPE, None)), named("H100", 80)
    stored, plain = (plan(each, None, gpu, LoadConfig(context=8192)).ledger for each in models)
    found, want = ({line.name: line.bytes or 0 for line in ledger.lines} for ledger in (stored, plain))
    assert found["workspace"] == want["workspace"] + 2 * DECODED_SLICE
    assert found["graphs and libraries"] == want["graphs and libraries"], "kernels multiply a block with the codes"
    stored, plain = (plan(each, None, gpu, LoadConfig(context=8192, dtype="float32")).ledger for each in models)
    found, want = ({line.name: line.bytes or 0 for line in ledger.lines} for ledger in (stored, plain))
    assert found["graphs and libraries"] - want["graphs and libraries"] == DEQUANTIZED_SLICE * DEQUANTIZED_BYTES


def test_published_bytes_are_those_of_the_format_that_experts_are_stored_in() -> None:
    """compressed-tensors is a container: its int4, int8 and fp4 are told apart, and what is not counted is unknown."""
    repo = "Qwen/Qwen3.5-35B-A3B"
    plain, *packed = (formats.published_bytes(target(repo, settings)) for settings in (None, *map(_packed, (4, 8))))
    experts = (plain or 0) - (packed[0] or 0)
    assert experts / ((plain or 0) - (packed[1] or 0)) == pytest.approx((2 - 0.5 - 2 / 32) / (2 - 1 - 2 / 32))
    assert formats.published_bytes(target(repo, USUAL["mxfp4"])) is None
    assert formats.published_bytes(target(SHAPE, USUAL["int4-g128"])) is None, "no expert is what is stored so"
    found = plan(target(repo, _packed(4)), None, named("H200", None), runs_on="server")
    assert found.ledger.lines[0].note == "int4 g32"


def _packed(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
