"""What a quantization_config says of each matrix, dialect by dialect."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.config.quantization import Quantization, StoredFp8, StoredInt4, read_quantization
from dflash_local.errors import CheckpointError

LAYER = "model.language_model.layers.3"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
G128 = StoredInt4("gptq", 128)


def packed(ignore: Any = (), **weights: Any) -> dict[str, Any]:
    told = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": told}},
        "ignore": ["lm_head", *ignore],
    }


def read(settings: dict[str, Any]) -> Quantization:
    found = read_quantization(Fields(settings, "x"))
    assert found is not None
    return found


def test_a_plain_checkpoint_has_none() -> None:
    assert read_quantization(Fields({}, "x")) is None


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        (FP8, StoredFp8((128, 128))),
        (GPTQ, G128),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, StoredInt4("gptq_v2", 128, zeros=True)),
        ({**GPTQ, "group_size": 32}, StoredInt4("gptq", 32)),
        ({**ROUND, "packing_format": "auto_round:auto_gptq"}, G128),
        (ROUND, G128),
        ({**ROUND, "packing_format": "auto_round:gptqv2", "sym": False}, StoredInt4("gptq_v2", 128, zeros=True)),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"}, StoredInt4("awq", 128, zeros=True)),
        (packed(), StoredInt4("pack-quantized", 32)),
        (packed(symmetric=False, group_size=128, actorder="static"), StoredInt4("pack-quantized", 128, zeros=True)),
    ],
)
def test_a_dialect_gives_the_format_of_a_matrix(settings: dict[str, Any], stored: object) -> None:
    found = read(settings)
    assert found.unread == ""
    assert found.stored(f"{LAYER}.mlp.up_proj") == stored
    assert found.stored("lm_head") is None and found.stored("language_model.lm_head") is None
    assert found.stored(f"{LAYER}.linear_attn.in_proj_a") is None, "no quantiser takes these"
    assert found.stored(f"{LAYER}.linear_attn.in_proj_b") is None


@pytest.mark.parametrize(
    ("settings", "plain", "coded"),
    [
        ({**FP8, "modules_to_not_convert": ["mlp.gate", f"{LAYER}.self_attn"]}, "self_attn.q_proj", "mlp.gate_proj"),
        ({**FP8, "ignored_layers": ["model.layers.3.self_attn.q_proj"]}, "self_attn.q_proj", "self_attn.k_proj"),
        ({**GPTQ, "dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}}}, "linear_attn.in_proj_qkv", "mlp.up_proj"),
        ({**GPTQ, "dynamic": {"-:model.layers.3.mlp": {}}}, "mlp.up_proj", "self_attn.q_proj"),
        ({**ROUND, "extra_config": {f"{LAYER}.mlp.up_proj": {"bits": 16}}}, "mlp.up_proj", "mlp.down_proj"),
        ({**ROUND, "extra_config": {".*self_attn.*": {"bits": 16}}}, "self_attn.q_proj", "mlp.down_proj"),
        (packed(["re:.*self_attn.*"]), "self_attn.q_proj", "mlp.up_proj"),
        (packed([f"{LAYER}.mlp.up_proj"]), "mlp.up_proj", "mlp.gate_proj"),
    ],
)
def test_rules_leave_modules_in_16_bits(settings: dict[str, Any], plain: str, coded: str) -> None:
    found = read(settings)
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        assert found.stored(f"{prefix}layers.3.{plain}") is None
        assert found.stored(f"{prefix}layers.3.{coded}") == found.default


def test_the_first_pattern_that_matches_decides() -> None:
    rules = {"+:.*layers.3.mlp.*": {"group_size": 32}, "-:.*mlp.*": {}, "model.layers.4": {"sym": False}}
    found = read({**GPTQ, "dynamic": rules})
    assert found.stored(f"{LAYER}.mlp.up_proj") == StoredInt4("gptq", 32)
    assert found.stored("model.layers.5.mlp.up_proj") is None
    assert found.stored("model.layers.4.self_attn.q_proj") == StoredInt4("gptq", 128, zeros=True)
    assert found.stored("decoder.model.layers.4") == G128, "patterns match from the beginning of a name"


def test_only_the_named_blocks_of_auto_round_are_quantised() -> None:
    found = read({**ROUND, "block_name_to_quantize": "model.language_model.layers,model.more"})
    assert found.stored(f"{LAYER}.mlp.up_proj") == found.stored("model.more.x") == G128
    assert found.stored("mtp.layers.0.mlp.up_proj") is None and found.stored("model.morex") is None


def test_groups_of_compressed_tensors_have_targets() -> None:
    settings = packed()
    wide = {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": wide}
    found = read(settings)
    assert found.stored(f"{LAYER}.mlp.down_proj") == StoredInt4("pack-quantized", 128)
    assert found.stored(f"{LAYER}.mlp.up_proj") == StoredInt4("pack-quantized", 32)


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the layout 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "awq without zero points"),
        ({"bits": 4}, "unknown"),
        ({"quant_method": "fp8"}, "fp8 with a scale for each tensor"),
        ({**GPTQ, "desc_act": True}, "gptq with desc_act, which scatters the groups"),
        ({**GPTQ, "bits": 8}, "gptq in 8 bits"),
        ({**GPTQ, "group_size": -1}, "gptq with one group for each row"),
        ({**GPTQ, "group_size": 16}, "gptq with groups of 16"),
        ({**GPTQ, "lm_head": True}, "gptq with a quantised lm_head"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq in the layout 'marlin'"),
        ({**GPTQ, "dynamic": {".*down.*": {"bits": 8}}}, "gptq in 8 bits"),
        ({**GPTQ, "rotation": "hadamard"}, "gptq with rotated activations"),
        (
            {**packed(), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "compressed-tensors with transforms of its activations",
        ),
        ({**ROUND, "packing_format": "auto_round:auto_awq"}, "auto-round in the layout 'auto_round:auto_awq'"),
        ({**ROUND, "sym": False}, "auto-round with zero points in the layout 'auto_round'"),
        ({**ROUND, "extra_config": {"lm_head": {"bits": 4}}}, "auto-round with a quantised lm_head"),
        (packed(actorder="group"), "compressed-tensors with actorder group, which scatters the groups"),
        (packed(num_bits=8), "compressed-tensors pack-quantized in 8 bits"),
        ({**packed(), "format": "float-quantized"}, "compressed-tensors float-quantized"),
        ({**packed(), "format": "nvfp4-pack-quantized"}, "compressed-tensors nvfp4-pack-quantized"),
        ({**packed(), "ignore": []}, "compressed-tensors with a quantised lm_head"),
    ],
)
def test_what_is_not_read_is_named(settings: dict[str, Any], unread: str) -> None:
    found = read(settings)
    assert found.unread == unread
    assert found.name == settings.get("quant_method", "unknown")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": 5}, "quant_method must be a word, got 5"),
        ({**GPTQ, "bits": "four"}, "bits must be a whole number, got 'four'"),
        ({**GPTQ, "group_size": 10**400}, "group_size an integer of .* is outside"),
        ({**GPTQ, "sym": 1}, "sym must be true or false"),
        ({**GPTQ, "dynamic": {".*": 5}}, "must be an object, got 5"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "is no regular expression"),
        ({**GPTQ, "dynamic": {"-:(a+)+$": {}}}, "is too long or repeats too much"),
        ({**GPTQ, "dynamic": {f"-:{'.*' * 9}": {}}}, "is too long or repeats too much"),
        ({**GPTQ, "dynamic": {f"-:a{index}": {} for index in range(1001)}}, "has 1001 patterns"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size 0 is outside"),
        ({**FP8, "ignored_layers": [5]}, "ignored_layers must be names"),
        ({**ROUND, "extra_config": {"x": 5}}, "must be an object, got 5"),
        ({**ROUND, "block_name_to_quantize": [5]}, "block_name_to_quantize must be names"),
        ({**packed(), "ignore": [5]}, "targets and ignore must be names"),
        ({**packed(), "config_groups": 5}, "config_groups must be an object"),
    ],
)
def test_an_impossible_value_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        read(settings)
    assert caught.value.message.startswith("x: ") and len(caught.value.message) < 300
