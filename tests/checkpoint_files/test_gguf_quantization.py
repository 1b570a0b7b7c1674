"""What a GGUF file's tensors say of its formats, and what is read of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.gguf_quantization import quantization_config
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.checkpoint_files.undo import Interleave, SwapAxes, Undo
from dflash_local.config.quantization import Quantization, StoredGguf
from dflash_local.config.quantizers import read_quantization

FILE = Path("model.gguf")
COLUMNS = (SwapAxes(1, 0, 1, 2, 2, 64),)


def info(name: str, dtype: str, shape: tuple[int, ...] = (256, 256), undo: tuple[Undo, ...] = ()) -> TensorInfo:
    return TensorInfo(f"model.{name}.weight", dtype, shape, FILE, undo=undo)


def read(*tensors: TensorInfo) -> Quantization:
    settings = quantization_config({each.name: each for each in tensors})
    assert settings is not None
    found = read_quantization(ConfigFields(settings, "model.gguf"))
    assert found is not None
    return found


def test_each_matrix_has_the_type_of_its_tensor() -> None:
    found = read(
        info("embed_tokens", "Q6_K"),
        info("layers.0.self_attn.q_proj", "Q4_K", undo=(SwapAxes(0, 0, 2, 64, 2, 1),)),
        info("layers.0.self_attn.v_proj", "Q6_K"),
        info("layers.0.mlp.gate", "F32"),
        info("layers.0.mlp.up_proj", "Q4_K", (1024, 256)),
        info("layers.1.linear_attn.in_proj_a", "Q8_0"),
        info("layers.0.input_layernorm", "F32", (256,)),
    )
    assert found.method == "gguf" and not found.unread and found.name == "Q4_K and Q6_K and Q8_0"
    expected = {"embed_tokens": "Q6_K", "layers.0.self_attn.q_proj": "Q4_K", "layers.0.self_attn.v_proj": "Q6_K"}
    expected |= {"layers.0.mlp.up_proj": "Q4_K", "layers.1.linear_attn.in_proj_a": "Q8_0"}
    for module, dtype in expected.items():
        for prefix in ("model.", ""):  # a planner has no prefix
            assert found.stored(f"{prefix}{module}") == found.rule(f"{prefix}{module}") == StoredGguf(dtype)
    assert found.stored("model.layers.0.mlp.gate") is None


def test_experts_are_told_by_layer_and_matrix() -> None:
    experts = [
        info(f"layers.{layer}.mlp.experts.{expert}.{matrix}_proj", "Q6_K" if matrix == "down" and layer else "Q4_K")
        for layer in range(12)
        for expert in range(4)
        for matrix in ("gate", "up", "down")
    ]
    plain = [info(f"layers.0.mlp.experts.{expert}.down_proj", "F16") for expert in range(4)]
    found = read(*experts, *plain)
    assert not found.names and len(found.patterns) == 2, "as many rules as types, however many experts"
    for layer, matrix, dtype in ((0, "down", None), (1, "down", "Q6_K"), (11, "down", "Q6_K"), (11, "up", "Q4_K")):
        stored = found.rule(f"model.layers.{layer}.mlp.experts.3.{matrix}_proj")
        assert stored == (None if dtype is None else StoredGguf(dtype)), (layer, matrix)


@pytest.mark.parametrize(
    ("name", "undo", "kept"),
    [
        ("layers.0.linear_attn.in_proj_qkvz", (Interleave(2, (64, 64)),), True),
        ("layers.0.self_attn.o_proj", COLUMNS, False),
        ("layers.0.linear_attn.out_proj", COLUMNS, True),  # the layer takes its columns as they lie
        ("layers.0.linear_attn.out_proj", (SwapAxes(1, 128, 1, 2, 2, 32),), False),
    ],
)
def test_what_cannot_be_put_in_order_in_blocks_becomes_plain(name: str, undo: tuple[Undo, ...], kept: bool) -> None:
    found = read(info("layers.0.mlp.up_proj", "Q4_K"), info(name, "Q4_K", undo=undo))
    assert found.rule(f"model.{name}") == (StoredGguf("Q4_K") if kept else None)


def test_a_tensor_of_two_types_becomes_plain() -> None:
    parts = (info("a", "Q4_K"), info("b", "Q6_K"))
    joined = TensorInfo("model.layers.0.linear_attn.in_proj_qkvz.weight", "Q4_K", (512, 256), FILE, parts=parts)
    found = read(info("layers.0.mlp.up_proj", "Q4_K"), joined)
    assert found.rule("model.layers.0.linear_attn.in_proj_qkvz") is None


def test_a_plain_file_has_no_quantization() -> None:
    assert quantization_config({each.name: each for each in (info("lm_head", "F16"), info("norm", "F32"))}) is None


def test_types_that_are_not_read_are_named() -> None:
    assert read(info("layers.0.mlp.up_proj", "Q2_K")).unread == "GGUF Q2_K"
