"""A configuration as features: of the registry's shapes, of every family, and of what is missing or impossible."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dflash_local.catalog.shapes import FOLDER, shape
from dflash_local.checkpoint_files.config_values import UnknownValue
from dflash_local.config.families import TABLE
from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig, ModelConfig, MoEConfig
from dflash_local.config.quantization import StoredFp4
from dflash_local.config.read_model import read_model
from dflash_local.drafters.kinds import ARCHITECTURES
from dflash_local.errors import CheckpointError, PairError
from tests.drafter_configs import published

NAMES = [path.stem.replace("--", "/") for path in sorted(FOLDER.glob("*.json"))]
TARGETS = [name for name in NAMES if (shape(name) or {})["architectures"][0] not in ARCHITECTURES]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1}


def read(architecture: str, **changes: Any) -> ModelConfig:
    return read_model({"architectures": [architecture], **SIZES, **changes}, "x")


def attention(model: ModelConfig, layer: int = 0) -> AttentionConfig:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


@pytest.mark.parametrize("repo", TARGETS)
def test_every_target_of_the_registry_is_known_in_all_its_sizes(repo: str) -> None:
    config = published(repo)
    model = read_model(config, repo)
    text = config.get("text_config", config)
    assert model.num_layers == text["num_hidden_layers"] and model.source == repo
    assert (model.hidden_size, model.vocab_size) == (text["hidden_size"], text["vocab_size"])
    likely = config["_inferred"].get("text_config.max_position_embeddings")
    assert model.max_position_embeddings == (text["max_position_embeddings"] or likely)
    assert model.recurrent == any(isinstance(layer.mixer, GatedDeltaNetConfig) for layer in model.layers)
    assert set(model.inferred) <= {name.rpartition(".")[2] for name in config["_inferred"]}


def test_a_hybrid_has_full_attention_in_the_last_of_every_four_layers() -> None:
    model = read("Qwen3_5ForCausalLM", **LINEAR)
    assert [isinstance(layer.mixer, GatedDeltaNetConfig) for layer in model.layers] == [True, True, True, False]
    assert model.layers[0].mixer == GatedDeltaNetConfig(2, 4, 8, 16, 4) and model.norm_plus_one
    assert (attention(model, 3).gated, attention(model, 3).rotary_dim) == (True, 2)
    every_other = read("Qwen3_5ForCausalLM", **LINEAR, full_attention_interval=2)
    assert attention(every_other, 1) == attention(every_other, 3)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 16}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, (None, None, 16, 16)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 16}, (None,) * 4),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4, "sliding_window": 16}, (16,) * 4),
    ],
)
def test_the_windows_of_qwen3_are_those_of_transformers(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    model = read("Qwen3ForCausalLM", **changes)
    assert tuple(attention(model, layer).sliding_window for layer in range(4)) == windows


@pytest.mark.parametrize(
    ("told", "window"), [({"sliding_window": 16}, 16), ({"sliding_window": None}, None), ({}, 4096)]
)
def test_all_layers_of_mistral_slide_unless_its_window_is_null(told: dict[str, Any], window: int | None) -> None:
    model = read("MistralForCausalLM", **told, attention_bias=True)
    assert [attention(model, layer).sliding_window for layer in range(4)] == [window] * 4
    assert not attention(model).qkv_bias and not attention(model).qk_norm


def test_experts_stand_where_transformers_puts_them() -> None:
    def mixtures(architecture: str, **changes: Any) -> list[bool]:
        return [isinstance(layer.mlp, MoEConfig) for layer in read(architecture, **changes).layers]

    assert mixtures("Qwen3MoeForCausalLM", **EXPERTS) == [True] * 4
    assert mixtures("Qwen3MoeForCausalLM", **EXPERTS, decoder_sparse_step=2) == [False, True, False, True]
    assert mixtures("Qwen3MoeForCausalLM", **EXPERTS, mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert mixtures("Qwen3MoeForCausalLM", num_experts=0) == [False] * 4
    assert mixtures("DeepseekV3ForCausalLM", **LATENT, **ROUTED) == [False, True, True, True]
    with pytest.raises(CheckpointError, match="x: layer 0 is made of experts, and there are 0 of them"):
        mixtures("GptOssForCausalLM", num_local_experts=0, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("architecture", "told", "normed"),
    [
        ("Qwen3MoeForCausalLM", {}, False),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}, True),
        ("Qwen3NextForCausalLM", {}, True),
        ("Qwen3NextForCausalLM", {"norm_topk_prob": False}, False),
        ("Qwen3_5MoeForCausalLM", {"norm_topk_prob": False}, True),  # has no such flag
    ],
)
def test_weights_of_experts_are_normed_as_transformers_does(
    architecture: str, told: dict[str, Any], normed: bool
) -> None:
    shared = {"shared_expert_intermediate_size": 24} if architecture != "Qwen3MoeForCausalLM" else {}
    mixture = read(architecture, **LINEAR, **EXPERTS, **shared, **told).layers[0].mlp
    assert isinstance(mixture, MoEConfig) and mixture.norm_topk_prob is normed


def test_a_shared_expert_is_told_by_its_width_or_by_a_count() -> None:
    shared = {**EXPERTS, "shared_expert_intermediate_size": 24}
    model = read("Qwen3_5MoeForCausalLM", **LINEAR, **shared)
    assert model.layers[0].mlp == MoEConfig(8, 2, 16, shared_intermediate_size=24, shared_gate=True)
    deep = read("DeepseekV3ForCausalLM", **LATENT, **ROUTED)
    assert deep.layers[3].mlp == MoEConfig(8, None, 16, shared_intermediate_size=32, scoring="sigmoid")


def test_llama_has_as_many_key_heads_as_query_heads_unless_told() -> None:
    assert attention(read("LlamaForCausalLM", num_key_value_heads=None)).num_kv_heads == 4
    with pytest.raises(UnknownValue, match="x: num_key_value_heads is missing"):
        read("Qwen3ForCausalLM", num_key_value_heads=None)


def test_the_text_model_of_a_wrapper_is_read() -> None:
    config = published("Qwen/Qwen3.5-9B")
    text = config["text_config"]
    alone = read_model({**text, "architectures": ["Qwen3_5ForCausalLM"]}, "x")
    assert read_model(config, "x") == alone and alone.rope_type == "default"
    untied = read_model({**config, "tie_word_embeddings": True}, "x")
    assert untied.tie_word_embeddings and not alone.tie_word_embeddings  # the whole configuration wins


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_is_not_ours_is_named(kind: str) -> None:
    model = read("LlamaForCausalLM", rope_scaling={"rope_type": kind, "factor": 2.0})
    assert model.rope is None and model.rope_type == kind


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"])
def test_a_needed_number_that_is_null_is_named(name: str) -> None:
    with pytest.raises(UnknownValue) as caught:
        read("Qwen3ForCausalLM", **{name: None})
    assert caught.value.name == name and caught.value.exit_code == 6
    assert (caught.value.message, caught.value.kind) == (f"x: {name} is missing", "CheckpointError")


@pytest.mark.parametrize("repo", ["Qwen/Qwen3.5-9B", "moonshotai/Kimi-K2.5"])
def test_a_nested_inferred_value_is_found(repo: str) -> None:
    config = copy.deepcopy(published(repo))
    config["text_config"]["vocab_size"] = None
    config["_inferred"]["text_config.vocab_size"] = 77
    model = read_model(config, "x")
    assert model.vocab_size == 77 and "vocab_size" in model.inferred


@pytest.mark.parametrize("wrong", ["4096", -1, 0, True, 3.5, [1], 10**400, 10.0**300])
def test_a_size_that_is_no_number_is_named(wrong: object) -> None:
    with pytest.raises(CheckpointError, match="x: hidden_size ") as caught:
        read("Qwen3ForCausalLM", hidden_size=wrong)
    assert caught.value.exit_code == 6 and len(caught.value.message) < 200
    assert not isinstance(caught.value, UnknownValue)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": 5}, "text_config must be an object, got 5"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types 'linear_attention' is not supported"),
        ({"quantization_config": {"quant_method": 5}}, "quant_method must be a word, got 5"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "sili"}, "hidden_act 'sili' is not supported"),
    ],
)
def test_an_impossible_value_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match="^x: ") as caught:
        read("Qwen3ForCausalLM", **changes)
    assert said in caught.value.message


@pytest.mark.parametrize("names", [None, [], "Qwen3ForCausalLM", [5], [[]], ["GPT2LMHeadModel"]])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(names: object) -> None:
    with pytest.raises(PairError, match="^x: target architecture .* is not supported") as caught:
        read_model({**SIZES, "architectures": names}, "x")
    assert all(name in caught.value.hint for family in TABLE for name in family.architectures)


def method(model: ModelConfig) -> str:
    assert model.quantization is not None
    return model.quantization.method


def test_the_published_format_and_dtype_are_kept_as_they_are_called() -> None:
    model = read_model(published("openai/gpt-oss-20b"), "x")
    assert method(model) == "mxfp4" and model.quantization is not None and not model.quantization.unread
    at = "model.layers.3."
    assert model.quantization.stored(f"{at}mlp.experts.7.up_proj") == StoredFp4("mxfp4")
    for name in ("mlp.router", "self_attn.q_proj"):
        assert model.quantization.stored(at + name) is None
    other = read_model({**published("Qwen/Qwen3-8B"), "quantization_config": {"quant_method": "mxfp4"}}, "x")
    assert other.quantization is not None and other.quantization.unread == "mxfp4", "only gpt-oss stores experts so"
    assert method(read_model(published("moonshotai/Kimi-K2.5"), "x")) == "compressed-tensors"
    assert method(read("Qwen3ForCausalLM", quantization_config={"bits": 4})) == "unknown"
    assert read("Qwen3ForCausalLM", torch_dtype="float16").stored_dtype == "float16"
    assert read("Qwen3ForCausalLM").stored_dtype == "bfloat16"
