"""Configurations that mean harm or are merely wrong: one key of a demo pair's config.json with another value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]  # given the pair's folder, which holds target/ and drafter/

HUGE = 10**400
JUNK: tuple[Any, ...] = ("8", "", -1, 0, 1.5, 2**31, 2**63, HUGE, True, [], [8], {}, {"a": 1})
BIG = (7, 1000, 2**18, 2**20)  # plausible, and at odds with the weights
NOT_FINITE: tuple[Any, ...] = (float("inf"), float("nan"), -1.0, 0, HUGE, "1", True, [])
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval"),
)
FLAGS = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
ROPES: tuple[Any, ...] = (
    *("x", 5, [], [1], {"rope_type": "evil"}, {"rope_type": 5}, {"rope_type": ["yarn"]}, {"rope_theta": "1"}),
    *({"rope_theta": value} for value in (0, -1, HUGE, float("nan"), float("inf"), [1], True)),
    *({"rope_type": kind, "rope_theta": 1e4} for kind in ("linear", "dynamic", "yarn", "longrope", "llama3")),
    *({"rope_type": kind, "rope_theta": 1e4, "factor": HUGE} for kind in ("linear", "dynamic", "yarn")),
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.0, "original_max_position_embeddings": 0},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": ["a"], "long_factor": [1.0]},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
    {"rope_theta": 1e4, "mrope_section": "abc"},
    {"rope_theta": 1e4, "partial_rotary_factor": 5},
    {"rope_theta": 1e4, "partial_rotary_factor": 0.01},
    {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}},
)
LAYERS: tuple[Any, ...] = (
    *("full_attention", 5, {}, [], [None], ["full_attention"], ["evil"] * 8, [["full_attention"]] * 8, [5] * 8),
    *(["full_attention"] * 100_000, ["sliding_attention"] * 8, ["linear_attention"] * 8, ["chunked_attention"] * 8),
)
KERNELS = ("kernels-community/flash-attn", "flex_attention", "paged|eager", "flash_attention_2", "eager", 5, {"": "x"})


def each(*values: Any) -> tuple[Any, ...]:
    """Values of several types."""
    return values


# Keys by which transformers fetches, imports, or takes up something else than what was checked.
BEHAVIOUR: dict[str, tuple[Any, ...]] = {
    "auto_map": ({"AutoConfig": "evil.Evil"}, {"AutoModelForCausalLM": "evil.Evil"}, "evil.Evil", ["evil"], {}, None),
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), KERNELS),
    "experts_implementation": ("kernels-community/moe", 5),
    "_experts_implementation": ("batched_mm", 5),
    "use_kernels": (True, "x"),
    "transformers_weights": ("../other.safetensors", "/etc/passwd", "adapter_model.bin", 5),
    "fusion_config": ({"patch_embeddings": True}, 5),
    "per_layer_config": ({"0": {"hidden_size": 5}}, 5),
    "distributed_config": ({"tp_size": 2}, 5),
    "quantization_config": (
        *({"quant_method": name} for name in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "quark")),
        *({"quant_method": value} for value in each("mxfp4", "evil", "x" * 100_000, 5, [], {}, None)),
        *(5, "gptq", [], {"bits": 4}, {"quant_method": "gptq", "modules_to_not_convert": 5}),
        *({"quant_method": "gptq", "bits": 4, "dynamic": value} for value in each(5, [], {"-:(a+)+$": {}}, {"(": {}})),
        *({"quant_method": "gptq", "bits": value} for value in each("4", -4, HUGE, [], {})),
        *({"quant_method": "gptq", "bits": 4, "group_size": value} for value in each("4", 0, HUGE, 3.5)),
        *({"quant_method": "fp8", "weight_block_size": value} for value in each(5, [], [0, 1], [HUGE, 1], ["1", 1])),
        *({"quant_method": "compressed-tensors", "config_groups": value} for value in each(5, [], {"a": 5}, {"a": {}})),
        *(
            {"quant_method": "auto-round", "bits": 4, "extra_config": value}
            for value in each(5, [], {"a": 5}, {"(": {}})
        ),
    ),
    "get_text_config": (5,),
    "dtype": ("evil", "save", 5, [], "float64"),
    "torch_dtype": ("evil", 5),
    "architectures": (None, [], "Qwen3ForCausalLM", [5], [[]], ["Evil"], {}, ["LlamaForCausalLM"]),
    "model_type": ("foreign_words", "llama", 5, [], {}, "x" * 100_000, "\ud800", "a\nb"),
    "text_config": (5, "x", [], [1], {"hidden_size": 5}, {"model_type": "evil"}, {"auto_map": {"AutoConfig": "e.E"}}),
    "custom_pipelines": ({"text-generation": {"impl": "evil.Evil"}},),
    "id2label": ("x", {"a": 1}, 5),
    "num_labels": (HUGE, "x"),
    "problem_type": ("single_label_classification", 5),
    "output_attentions": (True, 5),
    "return_dict": (False, "x"),
    "chunk_size_feed_forward": (-1, "x"),
    "name_or_path": ("../elsewhere", 5),
    "_commit_hash": ("x", 5),
    "eos_token_id": ("x", -1, HUGE, [None], [[2]], {}, 2.5, True),
    "pad_token_id": ("x", -1, HUGE),
    "hidden_act": ("sili", 5, [], {}, "x" * 100_000, "gelu"),
    "mlp_only_layers": ("x", [HUGE], 5),
    "max_window_layers": ("x", -1, HUGE),
    "sliding_window": ("x", -1, HUGE, 0, 4),
    "use_bidirectional_attention": (False, True, 5, "x"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (*NOT_FINITE, None, 3.0)),
    "hidden_activation": ("sili", 5, "gelu"),
    "rms_norm_eps": NOT_FINITE,
    "initializer_range": ("x", HUGE),
    "attention_dropout": ("x", HUGE, 2),
    "__class__": ("evil",),
    "to_dict": (5,),
}
DRAFTER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), (*JUNK, *BIG)),
    **dict.fromkeys(("head_dim", "num_key_value_heads", "max_position_embeddings", "num_target_layers"), JUNK),
    "rms_norm_eps": NOT_FINITE,
    "rope_theta": NOT_FINITE,
    "rope_parameters": ROPES,
    "layer_types": LAYERS,
    "auto_map": (*BEHAVIOUR["auto_map"],),
    "architectures": (None, [], [5], ["DFlash2DraftModel"], "DFlashDraftModel", {}),
    "dflash_config": (None, 5, [], "x", {}, {"target_layer_ids": []}),
    "hidden_act": ("sili", 5),
    "attn_implementation": KERNELS[:2],
    "quantization_config": ({"quant_method": "gptq"},),
}
NESTED: dict[str, tuple[Any, ...]] = {
    "target_layer_ids": ("x", 5, [], [HUGE], [-1], [True], ["1"], [[1]], [100], [1, 1, 1, 1], [6, 5, 3, 1], [1] * 1000),
    "mask_token_id": (None, *JUNK),
    "block_size": (None, *JUNK, 64),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile pair: ``base`` is the demo pair it is made of, ``change`` what is done to a copy."""

    group: str
    name: str
    change: Change
    base: str = "demo"


def edited(part: str, file: str, change: Callable[[Any], Any]) -> Change:
    """Change the JSON in a file; what ``change`` returns replaces it, unless that is None."""

    def apply(pair: Path) -> None:
        path = pair / part / file
        value = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(change(value) or value), encoding="utf-8")

    return apply


def put(part: str, key: str, value: Any, inside: str = "") -> Change:
    """Set a key of a config.json, or of an object in it."""

    def change(config: dict[str, Any]) -> None:
        if key == "rope_scaling":
            config.pop("rope_parameters", None)
        (config[inside] if inside else config)[key] = value

    return edited(part, "config.json", change)


def removed(part: str, key: str) -> Change:
    return edited(part, "config.json", lambda config: {k: v for k, v in config.items() if k != key})


def short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else f"10**{len(str(value)) - 1}"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)})"


def field_cases() -> Iterator[Case]:
    """Every field of both configurations with values of the wrong kind, and fields that change what is loaded."""
    target: dict[str, tuple[Any, ...]] = dict.fromkeys(SIZES, (*JUNK, *BIG))
    target |= {key: ("yes", 2, [], {}, HUGE) for key in FLAGS}
    target |= BEHAVIOUR | {"layer_types": LAYERS, "rope_parameters": ROPES, "rope_scaling": ROPES}
    for part, table in (("target", target), ("drafter", DRAFTER)):
        for key, values in table.items():
            for value in values:
                yield Case(f"{part} config", f"{key} = {short(value)}", put(part, key, value))
            yield Case(f"{part} config", f"without {key}", removed(part, key))
    for key, values in NESTED.items():
        for value in values:
            yield Case(
                "drafter config", f"dflash_config.{key} = {short(value)}", put("drafter", key, value, "dflash_config")
            )
    for key, value in product(LINEAR, (*JUNK, *BIG)):
        yield Case("hybrid config", f"{key} = {short(value)}", put("target", key, value), "demo-hybrid")
    for value in ROPES:
        yield Case("hybrid config", f"rope {short(value)}", put("target", "rope_parameters", value), "demo-hybrid")
