"""Published quantized checkpoints, read as they lie: both engines compute what their codes stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight
from dflash_local.load_config import LOAD_OPTIONS
from dflash_local.models import load_target as load
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.decoded_tensors import decoded_tensors
from dflash_local.models.fused.linear import gathered_rows, int8_copy
from dflash_local.models.target_facts import TargetFacts
from tests.both_engines import assert_alike, fused_tokens, logits, reference, reference_tokens, weights_of
from tests.quantized_checkpoints import CODED, DIALECTS, rewritten, save_quantized

FAMILIES = ("llama_biased", "qwen3", "qwen3_5")


def kept_as(dialect: str) -> type:
    return Fp4Weight if "fp4" in dialect else Fp8Weight if "fp8" in dialect or "float" in dialect else IntWeight


# One of each kind of weight; every matrix of every dialect is read to the bit below.
# The first and the fourth are of the family with biases: a scale behind the product, and codes.
EACH = ("modelopt_fp8", "fp8", "int_quantized", "gptq_zeros", "modelopt_nvfp4")
HERE_TOO = tuple(zip(cycle(FAMILIES), EACH))
LONG = tuple(zip(cycle(FAMILIES), DIALECTS))
PAIRS = [*HERE_TOO, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in LONG if pair not in HERE_TOO)]


@pytest.mark.parametrize(("family", "dialect"), PAIRS)
def test_both_engines_give_the_tokens_of_the_decoded_weights(family: str, dialect: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 64} if family == "llama_biased" else {}
    folder, twin = save_quantized(family, tmp_path, dialect, sizes=sizes)
    want = reference_tokens(twin)
    assert len(set(want)) > 1, "a reply of one token would show nothing"
    assert fused_tokens(folder) == want
    assert reference_tokens(folder) == want
    assert torch.allclose(logits(folder), logits(twin), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_matrix_is_decoded_to_the_bit(dialect: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder, twin = save_quantized("qwen3_5", tmp_path, dialect, sizes=sizes)
    found, want = reference(folder).state_dict(), load_file(twin / "model.safetensors")
    assert set(found) == set(want)
    assert all(torch.equal(found[name], want[name]) for name in want)
    kinds = {type(product.weight) for product in weights_of(folder)[0].products}
    assert kinds == {torch.Tensor, kept_as(dialect)}, "b and a stay plain"


def test_decoded_weights_are_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes them as they are: nothing is held twice."""
    decoded: dict[str, torch.Tensor] = {}

    def spied(*given: Any) -> dict[str, torch.Tensor]:
        decoded.update(decoded_tensors(*given))
        return decoded

    monkeypatch.setattr(load, "decoded_tensors", spied)
    folder, _ = save_quantized("qwen3", tmp_path, "gptq")
    found = reference(folder, torch.bfloat16).state_dict()
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == {
        name: tensor.data_ptr() for name, tensor in decoded.items()
    }


def test_a_file_without_g_idx_is_read(tmp_path: Path) -> None:
    folder, twin = save_quantized("qwen3", tmp_path, "gptq")
    with rewritten(folder) as tensors:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]
    assert torch.allclose(logits(folder), logits(twin), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        ("awq", {"modules_to_not_convert": ["self_attn"]}),
        ("gptq", {}),  # the file alone says so
    ],
)
def test_modules_left_in_16_bits_are_read_so(dialect: str, changes: dict[str, Any], tmp_path: Path) -> None:
    mlp = tuple(name for name in CODED if name.endswith(("gate_proj", "up_proj", "down_proj")))
    folder, twin = save_quantized("qwen3", tmp_path, dialect, coded=mlp, changes=changes)
    weights, _ = weights_of(folder)
    kinds = {isinstance(product.weight, torch.Tensor) for product in weights.layers[0].mixer.products}
    assert kinds == {True} and not isinstance(weights.layers[0].mlp.products[0].weight, torch.Tensor)
    assert_alike(folder, twin)


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [("auto_round_8", {"extra_config": {"lm_head": {"bits": 8}}}), ("modelopt_nvfp4", {"ignore": []})],
)
def test_a_quantized_head_is_kept_as_it_is_stored(dialect: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder, twin = save_quantized("qwen3", tmp_path, dialect, coded=(*CODED, "lm_head"), changes=changes)
    weights = weights_of(folder)[0]
    head = weights.head
    assert type(head.weight) is kept_as(dialect) and head.out_features == 96
    assert weights.measured == (*weights.products, head), "its kernel is chosen with the others"
    assert_alike(folder, twin)
    ids = torch.tensor([0, 5, 40, 41, 95])
    some = gathered_rows(head, ids, False).weight
    assert torch.equal(some, head.weight.dequantized()[ids]), "rows of any block"  # type: ignore[arg-type, union-attr]
    assert int8_copy(head) is head, "it is coarse already"


def test_modelopt_may_leave_its_configuration_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As its older versions do."""
    folder, twin = save_quantized("llama", tmp_path, "modelopt_fp8")
    config = json.loads((folder / "config.json").read_text())
    told = config.pop("quantization_config")
    old = {"quant_algo": told["quant_algo"], "exclude_modules": told["ignore"], "kv_cache_quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": old}))
    _, facts = weights_of(folder)
    assert facts.model.quantization is not None and facts.model.quantization.name == "fp8 per tensor"
    assert facts.model.quantization.ignored == ("activations in 8 bits", "KV cache in fewer bits")
    assert_alike(folder, twin)
    config["quantization_config"] = told
    (folder / "config.json").write_text(json.dumps(config))
    assert open_source(folder).config() == config, "what it says itself comes first"


def test_one_file_may_hold_three_formats_and_a_quantized_head(tmp_path: Path) -> None:
    """As ModelOpt's mixed precision: attention in fp8, the rest in NVFP4, Gated DeltaNet in 16 bits."""
    attention = (".q_proj", ".k_proj", ".v_proj", ".o_proj")
    mlp = (".gate_proj", ".up_proj", ".down_proj", "lm_head")
    coded = {**dict.fromkeys(attention, "modelopt_fp8"), **dict.fromkeys(mlp, "modelopt_nvfp4")}
    modules: dict[str, Any] = {f"model.layers.2.self_attn{name}": {"quant_algo": "FP8"} for name in attention}
    for layer in range(4):
        modules |= {f"model.layers.{layer}.mlp{name}": {"quant_algo": "NVFP4", "group_size": 16} for name in mlp[:3]}
    modules["lm_head"] = {"quant_algo": "NVFP4", "group_size": 16}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": modules, "ignore": ["*linear_attn*", "mtp*"]}
    folder, twin = save_quantized("qwen3_5", tmp_path, "modelopt_nvfp4", coded=coded, changes=mixed)
    weights, _ = weights_of(folder)
    kinds = [{type(product.weight) for product in layer.mixer.products} for layer in weights.layers]
    assert kinds == [{torch.Tensor}] * 2 + [{Fp8Weight}, {torch.Tensor}], "three scales of q, k and v, one weight"
    assert {type(product.weight) for layer in weights.layers for product in layer.mlp.products} == {Fp4Weight}
    assert type(weights.head.weight) is Fp4Weight
    assert_alike(folder, twin)


def test_a_file_knows_more_than_a_configuration_that_forgets_or_mistakes_modules(tmp_path: Path) -> None:
    """One module is said to stay in 16 bits, another to be of the other format."""
    coded = {".up_proj": "modelopt_nvfp4", ".down_proj": "modelopt_nvfp4", ".q_proj": "modelopt_fp8"}
    modules: dict[str, Any] = {f"model.layers.{layer}.mlp.up_proj": {"quant_algo": "NVFP4"} for layer in range(4)}
    modules |= {f"model.layers.{layer}.self_attn.q_proj": {"quant_algo": "NVFP4"} for layer in range(1, 4)}
    modules["model.layers.0.self_attn.q_proj"] = {"quant_algo": "FP8"}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": modules}
    folder, twin = save_quantized("qwen3", tmp_path, "modelopt_nvfp4", coded=coded, changes=mixed)
    assert_alike(folder, twin)


def test_decay_projections_are_read_quantized_where_a_file_has_them_so(tmp_path: Path) -> None:
    """As some quantizers that know nothing of a model's parts leave them."""
    coded = (*CODED, ".in_proj_a", ".in_proj_b")
    folder, twin = save_quantized("qwen3_5", tmp_path, "pack_quantized", coded=coded, changes={"ignore": ["lm_head"]})
    assert [type(product.weight) for product in weights_of(folder)[0].layers[0].mixer.products] == [IntWeight] * 2
    assert_alike(folder, twin)


def test_scales_of_activations_and_caches_are_left_alone(tmp_path: Path) -> None:
    folder, twin = save_quantized("qwen3", tmp_path, "fp8")
    with rewritten(folder) as tensors:
        for name in ("self_attn.k_scale", "self_attn.v_scale", "mlp.up_proj.input_scale"):
            tensors[f"model.layers.0.{name}"] = torch.ones(())
    assert_alike(folder, twin)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    folder, _ = save_quantized("qwen3", tmp_path, "gptq")
    facts = TargetFacts.from_checkpoint(Checkpoint.open(folder))
    for quantize in LOAD_OPTIONS["quantize"].choices:
        with pytest.raises(UsageError, match=f"{quantize} on top of int4 g32 is not supported"):
            facts.quantized(quantize)


def test_a_wrapped_target_is_read_by_either_spelling_of_its_modules(tmp_path: Path) -> None:
    mlp = (".gate_proj", ".up_proj", ".down_proj")
    ignore = ["lm_head", *(f"model.layers.{index}.linear_attn.in_proj_qkv" for index in range(4))]
    folder, twin = save_quantized("qwen3_5", tmp_path, "pack_quantized", coded=mlp, changes={"ignore": ignore})
    for each in (folder, twin):
        config = json.loads((each / "config.json").read_text())
        quantization = {key: config.pop(key) for key in ("quantization_config",) if key in config}
        wrapper = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
        (each / "config.json").write_text(json.dumps({**wrapper, "text_config": config, **quantization}))
        file = each / "model.safetensors"
        tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in load_file(file).items()}
        save_file({**tensors, "model.visual.patch.weight": torch.zeros(3)}, file, metadata={"format": "pt"})
    facts = TargetFacts.from_checkpoint(Checkpoint.open(folder))
    assert facts.model.quantization is not None
    assert facts.model.quantization.stored("model.language_model.layers.0.linear_attn.in_proj_qkv") is None
    assert fused_tokens(folder) == reference_tokens(folder) == fused_tokens(twin)


MIXTURES = {"moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"),
            "lacks the tensor model.layers.1.mlp.experts.5.up_proj.weight_scale_inv",
        ),
        (
            lambda tensors: [
                tensors.pop(f"model.layers.1.mlp.experts.5.up_proj.{name}") for name in ("weight", "weight_scale_inv")
            ],
            "layers.1.mlp.experts has 23 tensors in the files, expected 24",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(32, 64)}),
            "experts.8.up_proj",
        ),
    ],
)
def test_an_expert_that_is_missing_or_too_many_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, tmp_path: Path
) -> None:
    folder, _ = save_quantized("qwen3_moe", tmp_path, "fp8", sizes=MIXTURES)
    with rewritten(folder) as tensors:
        change(tensors)
    with pytest.raises(CheckpointError, match=said):
        reference(folder)
