"""What a quantization_config says of each matrix, dialect by dialect."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.config.quantization import WHOLE, Quantization, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.config.quantizers import read_quantization
from dflash_local.errors import CheckpointError

LAYER = "model.language_model.layers.3"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSOR, CHANNEL = StoredFp8((WHOLE, WHOLE)), StoredFp8((1, WHOLE))
G128 = StoredInt("gptq", 128)


def packed(ignore: Any = (), **weights: Any) -> dict[str, Any]:
    told = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": told}},
        "ignore": ["lm_head", *ignore],
    }


GROUP = packed()["config_groups"]["group_0"]


def compressed(layout: str, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def modelopt(algorithm: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **others}


def read(settings: dict[str, Any]) -> Quantization:
    found = read_quantization(ConfigFields(settings, "x"))
    assert found is not None
    return found


def test_a_plain_checkpoint_has_none() -> None:
    assert read_quantization(ConfigFields({}, "x")) is None


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({**ROUND, "quant_method": "intel/auto-round", "backend": "auto_round:gptq"}, G128),
        ({**ROUND, "packing_format": "auto_round:gptqv2", "sym": False}, StoredInt("gptq_v2", 128, zeros=True)),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, StoredInt("awq", 128, zeros=True)),  # all are 8
        (packed(symmetric=False, group_size=128, actorder="static"), StoredInt("pack-quantized", 128, zeros=True)),
        (compressed("naive-quantized", num_bits=8, type="int"), StoredInt("int-quantized", WHOLE, bits=8)),
        (compressed("naive-quantized", num_bits=8, strategy="tensor"), TENSOR),
        (compressed("float-quantized", num_bits=8, strategy="group", group_size=128), StoredFp8((1, 128))),
        (modelopt("fp8_pb_wo"), StoredFp8((128, 128))),
        ({**modelopt("W4A16_NVFP4"), "quant_method": "modelopt_fp4"}, StoredFp4("nvfp4")),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
            StoredFp4("nvfp4"),
        ),
    ],
)
def test_a_dialect_gives_the_format_of_a_matrix(settings: dict[str, Any], stored: object) -> None:
    """Spellings beside those of ``quantized_checkpoints.DIALECTS``, whose files are read whole."""
    found = read(settings)
    assert found.unread == ""
    assert found.stored(f"{LAYER}.mlp.up_proj") == stored
    assert found.stored("lm_head") is None and found.stored("language_model.lm_head") is None
    assert found.stored(f"{LAYER}.linear_attn.in_proj_a") is None, "no quantizer takes these"
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
        (modelopt("NVFP4", ignore=["model.layers.3.self_attn*"]), "self_attn.q_proj", "mlp.up_proj"),
        (modelopt("NVFP4", ignore=["*.mlp.up_proj"]), "mlp.up_proj", "mlp.gate_proj"),
        (modelopt("NVFP4", modules_to_not_convert=["*self_attn*"]), "self_attn.q_proj", "mlp.up_proj"),
        (modelopt("FP8", ignore=["model.language_model.layers.3.mlp"]), "mlp.up_proj", "self_attn.q_proj"),
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
    assert found.stored(f"{LAYER}.mlp.up_proj") == StoredInt("gptq", 32)
    assert found.stored("model.layers.5.mlp.up_proj") is None
    assert found.stored("model.layers.4.self_attn.q_proj") == StoredInt("gptq", 128, zeros=True)
    assert found.stored("decoder.model.layers.4") == G128, "patterns match from the beginning of a name"


def test_only_the_named_blocks_of_auto_round_are_quantized() -> None:
    found = read({**ROUND, "block_name_to_quantize": "model.language_model.layers,model.more"})
    assert found.stored(f"{LAYER}.mlp.up_proj") == found.stored("model.more.x") == G128
    assert found.stored("mtp.layers.0.mlp.up_proj") is None and found.stored("model.morex") is None


def test_groups_of_compressed_tensors_may_be_of_different_formats() -> None:
    fp4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    attention = [f"{LAYER}.self_attn.q_proj", "re:.*linear_attn[.].*"]
    groups = {
        "group_0": {"targets": ["Linear"], "weights": fp4, "format": "nvfp4-pack-quantized"},
        "group_1": {"targets": attention, "weights": fp8, "format": "float-quantized"},
        "group_2": {"targets": ["model.layers.4.mlp.up_proj", "lm_head"], "weights": {"num_bits": 8}},
    }
    ignore = ["lm_head", "re:.*mtp.*"]
    found = read({**compressed("mixed-precision"), "config_groups": groups, "ignore": ignore})
    assert found.stored(f"{LAYER}.mlp.up_proj") == StoredFp4("nvfp4-pack-quantized")
    assert found.stored(f"{LAYER}.self_attn.q_proj") == found.stored(f"{LAYER}.linear_attn.in_proj_z") == CHANNEL
    assert found.stored("mtp.layers.0.mlp.up_proj") is None and found.stored("lm_head") is None
    assert found.stored("model.layers.4.mlp.up_proj") == StoredInt("pack-quantized", WHOLE, bits=8)
    assert found.name == "nvfp4 and fp8 per channel and int8 per channel"


def test_modelopt_lists_the_layers_of_mixed_precision() -> None:
    """What is not listed stays in 16 bits, and so does what is left out beside; names as of either prefix."""
    layers = {
        f"{LAYER}.self_attn.q_proj": {"quant_algo": "FP8"},
        f"{LAYER}.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.4.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.5.mlp.up_proj": {"quant_algo": "NVFP4"},
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
    }
    settings = modelopt("MIXED_PRECISION", quantized_layers=layers, ignore=["model.layers.5*"])
    for told in (settings, {**settings, "quantized_layers": {"quantized_layers": layers}}):
        found = read(told)
        assert found.stored(f"{LAYER}.self_attn.q_proj") == TENSOR
        assert found.stored("language_model.model.layers.3.mlp.up_proj") == StoredFp4("nvfp4")
        assert found.stored("model.language_model.layers.4.mlp.up_proj") == StoredFp4("nvfp4")
        assert found.stored("lm_head") == StoredFp4("nvfp4")
        assert found.stored(f"{LAYER}.self_attn.k_proj") is None and found.stored("mtp.fc") is None
        assert found.stored("model.layers.5.mlp.up_proj") is None
        assert found.name == "nvfp4 and fp8 per tensor"


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({**GPTQ, "lm_head": True}, G128),
        ({**GPTQ, "lm_head": True, "dynamic": {"+:lm_head": {"bits": 8}}}, StoredInt("gptq", 128, bits=8)),
        ({**ROUND, "extra_config": {"lm_head": {"bits": 8}}}, StoredInt("gptq", 128, bits=8)),
        ({**ROUND, "quant_lm_head": True, "block_name_to_quantize": "model.layers"}, G128),
        ({**packed(), "ignore": []}, StoredInt("pack-quantized", 32)),
        (modelopt("NVFP4", ignore=[]), StoredFp4("nvfp4")),
    ],
)
def test_a_head_may_be_quantized(settings: dict[str, Any], stored: StoredFormat) -> None:
    found = read(settings)
    assert found.stored("lm_head") == found.stored("language_model.lm_head") == stored


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        (GPTQ, ()),
        (FP8, ()),
        ({**FP8, "activation_scheme": "dynamic"}, ("activations in 8 bits",)),
        ({**ROUND, "act_bits": 8}, ("activations in 8 bits",)),
        ({**ROUND, "act_bits": 16}, ()),
        (packed(), ()),
        (compressed("float-quantized", {"num_bits": 8}, num_bits=8), ("activations in 8 bits",)),
        ({**packed(), "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, ("KV cache in fewer bits",)),
        (modelopt("NVFP4", kv_cache_scheme={"num_bits": 8}), ("activations in 4 bits", "KV cache in fewer bits")),
        (modelopt("W4A16_NVFP4", kv_cache_scheme=None), ()),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            ("activations in 8 bits", "KV cache in fewer bits"),
        ),
    ],
)
def test_what_servers_quantize_beside_the_weights_is_named(settings: dict[str, Any], ignored: tuple[str, ...]) -> None:
    found = read(settings)
    assert found.ignored == ignored
    assert all(each in found.remark for each in ignored) and bool(found.remark) == bool(ignored)


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the layout 'gemv'"),
        ({"bits": 4}, "unknown"),
        ({**GPTQ, "desc_act": True}, "gptq with desc_act, which scatters the groups"),
        ({**GPTQ, "group_size": 16}, "gptq with groups of 16"),
        ({**GPTQ, "dynamic": {".*down.*": {"bits": 2}}}, "gptq in 2 bits"),
        ({**GPTQ, "rotation": "hadamard"}, "gptq with rotated activations"),
        (
            {**packed(), "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "compressed-tensors with transforms of its activations",
        ),
        ({**ROUND, "data_type": "mx_fp"}, "auto-round of the type 'mx_fp'"),
        ({**ROUND, "sym": False}, "auto-round with zero points in the layout 'auto_round'"),
        (packed(actorder="group"), "compressed-tensors with actorder group, which scatters the groups"),
        ({**packed(), "format": "marlin-24"}, "compressed-tensors marlin-24"),
        ({**packed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors sparse-24-bitmask"),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, group_size=32),
            "compressed-tensors nvfp4-pack-quantized with groups of 32",
        ),
        ({**FP8, "fmt": "e5m2"}, "fp8 as 'e5m2'"),
        ({"quant_method": "modelopt"}, "modelopt without quant_algo"),
        (modelopt("NVFP4_AWQ"), "modelopt NVFP4_AWQ"),
        (modelopt("MIXED_PRECISION"), "modelopt MIXED_PRECISION without quantized_layers"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A16_AWQ"}}), "modelopt W4A16_AWQ"),
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
        ({**GPTQ, "group_size": 10**400}, "group_size an integer of .* is outside"),
        ({**GPTQ, "sym": 1}, "sym must be true or false"),
        ({**GPTQ, "dynamic": {".*": 5}}, "must be an object, got 5"),
        ({**GPTQ, "dynamic": {"-:(a+)+$": {}}}, "is not read: it has a group that repeats"),
        (
            {**GPTQ, "dynamic": {f"-:[z-a{'b' * 5000}]": {}}},
            "is not read: it has .{22}, of which re says: bad character range",
        ),
        ({**GPTQ, "dynamic": {f"-:{'.*' * 2501}": {}}}, "has 1 patterns of 5002 parts, at most 1000 of 5000"),
        ({**GPTQ, "dynamic": {f"-:a{index}": {} for index in range(1001)}}, "has 1001 patterns"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two numbers"),
        ({**FP8, "ignored_layers": [5]}, "ignored_layers must be names"),
        ({**packed(), "ignore": [5]}, "targets and ignore must be names"),
        ({**packed(), "config_groups": {"a": {**GROUP, "targets": [{"a": 1}]}}}, "targets must be names"),
    ],
)
def test_an_impossible_value_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        read(settings)
    assert caught.value.message.startswith("x: ") and len(caught.value.message) < 300
