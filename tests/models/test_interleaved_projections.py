"""Gated-DeltaNet projections whose rows go by key heads (Qwen3-Next), in every kind of format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.errors import CheckpointError
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.models.fused.gated_delta_net import by_parts, reorder_rows
from tests.both_engines import fused_tokens, logits, reference_tokens, weights_of
from tests.families import save_model
from tests.quantized_checkpoints import CODED, SIZES, save_quantized
from tests.quantized_weights import fp8, int4

DENSE = {"mlp_only_layers": [0, 1, 2, 3]}
WIDE = {**DENSE, "linear_key_head_dim": 128, "linear_value_head_dim": 64}
QUANTISED = (*CODED, ".in_proj_qkvz")
# A format of each kind of weight; that the scales of every kind move with its codes is tested above.
WHOLE_ROWS = ("gptq_zeros", "float_quantized_channel", "modelopt_nvfp4")


def test_rows_are_those_of_the_parts() -> None:
    """Three key heads of two dimensions, each with two value heads of one."""
    shape = GatedDeltaNetConfig(3, 6, 2, 1, conv_kernel_size=4, split_projections=False)
    found = by_parts(shape).tolist()
    assert found[:6] == [0, 1, 8, 9, 16, 17], "queries"
    assert found[6:12] == [2, 3, 10, 11, 18, 19], "keys"
    assert found[12:18] == [4, 5, 12, 13, 20, 21], "values"
    assert found[18:24] == [6, 7, 14, 15, 22, 23], "z"
    assert found[24:] == [24, 25, 28, 29, 32, 33, 26, 27, 30, 31, 34, 35], "b, then a"


def test_blocks_that_rows_cross_are_refused_and_so_are_packed_rows() -> None:
    order = torch.arange(96).view(2, 3, 16).transpose(0, 1).flatten()
    with pytest.raises(CheckpointError, match="at: its rows go by key heads, which the blocks of 32 rows"):
        reorder_rows(fp8(96, 64, (32, 32)), order, "at")
    with pytest.raises(TypeError, match="packed"):
        reorder_rows(FragmentWeight.of(int4(96, 64, 32)), order, "at")


@pytest.mark.parametrize("dialect", WHOLE_ROWS)
def test_rows_of_a_quantized_checkpoint_are_put_in_order(dialect: str, tmp_path: Path) -> None:
    check(*save_quantized("qwen3_next", tmp_path, dialect, coded=QUANTISED, sizes=DENSE))


def check(folder: Path, twin: Path) -> None:
    want = reference_tokens(twin)
    assert len(set(want)) > 2, "a reply of one token would show nothing"
    assert fused_tokens(twin) == want == fused_tokens(folder)
    assert torch.allclose(logits(folder), logits(twin), atol=2e-4, rtol=1e-3)
    kinds = [type(product.weight) for product in weights_of(folder)[0].layers[0].mixer.products]
    assert kinds[1] is torch.Tensor is not kinds[0], "b and a stay plain"


def test_crossed_blocks_of_a_checkpoint_are_refused_in_one_line(tmp_path: Path) -> None:
    folder, _ = save_quantized("qwen3_next", tmp_path, "fp8", coded=QUANTISED, sizes=DENSE)
    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.in_proj: its rows go by key heads"):
        weights_of(folder)


@pytest.mark.parametrize(("quantize", "sizes"), [("int4", DENSE), ("int8", DENSE), ("fp8", WIDE), ("int8", {})])
def test_weights_quantized_as_they_are_read_are_those_of_the_reference(
    quantize: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model("qwen3_next", tmp_path, **SIZES, **sizes)
    assert fused_tokens(folder, quantize) == reference_tokens(folder, quantize)
    assert type(weights_of(folder, quantize)[0].layers[0].mixer.products[0].weight) is not torch.Tensor
