"""Describe what may stand in a target's configuration: the keys that shape a text model, each with its type and bounds.

Whatever is not in these tables goes no further: neither to our engines nor to transformers, whose
configurations take any key, some of which name files, kernels or code. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields, shown
from dflash_local.errors import CheckpointError

MAX_WIDTH, MAX_VOCAB, MAX_WINDOW, MAX_POSITION = 2**18, 2**23, 2**24, 2**30
MAX_LAYERS, MAX_HEADS, MAX_EXPERTS = 1024, 4096, 2**16

# Zero stands for "none" in some of those that count experts.
INTEGERS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, MAX_VOCAB),
    "hidden_size": (1, MAX_WIDTH),
    "intermediate_size": (1, 4 * MAX_WIDTH),
    "num_hidden_layers": (1, MAX_LAYERS),
    "num_attention_heads": (1, MAX_HEADS),
    "num_key_value_heads": (1, MAX_HEADS),
    "head_dim": (2, MAX_HEADS),
    "max_position_embeddings": (1, MAX_POSITION),
    "sliding_window": (0, MAX_WINDOW),
    "max_window_layers": (0, MAX_WINDOW),
    "full_attention_interval": (1, MAX_LAYERS),
    "linear_conv_kernel_dim": (2, 64),
    "linear_key_head_dim": (1, MAX_HEADS),
    "linear_value_head_dim": (1, MAX_HEADS),
    "linear_num_key_heads": (1, MAX_HEADS),
    "linear_num_value_heads": (1, MAX_HEADS),
    "num_experts": (0, MAX_EXPERTS),
    "num_local_experts": (0, MAX_EXPERTS),
    "n_routed_experts": (0, MAX_EXPERTS),
    "n_shared_experts": (0, MAX_EXPERTS),
    "num_experts_per_tok": (0, MAX_EXPERTS),
    "moe_intermediate_size": (0, 4 * MAX_WIDTH),
    "shared_expert_intermediate_size": (0, 4 * MAX_WIDTH),
    "decoder_sparse_step": (0, MAX_LAYERS),
    "first_k_dense_replace": (0, MAX_LAYERS),
    "n_group": (1, MAX_EXPERTS),
    "topk_group": (1, MAX_EXPERTS),
    "q_lora_rank": (1, MAX_WIDTH),
    "kv_lora_rank": (1, MAX_WIDTH),
    "qk_nope_head_dim": (1, MAX_HEADS),
    "qk_rope_head_dim": (2, MAX_HEADS),
    "v_head_dim": (1, MAX_HEADS),
    "query_pre_attn_scalar": (1, MAX_WIDTH),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (1e-12, 0.1),
    "rope_theta": (1.0 + 1e-6, 1e12),
    "partial_rotary_factor": (1e-3, 1.0),
    "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_alpha": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "attn_logit_softcapping": (1e-3, 1e6),
    "final_logit_softcapping": (1e-3, 1e6),
}
FLAGS = ("attention_bias", "mlp_bias", "norm_topk_prob", "rope_interleave", "tie_word_embeddings", "use_sliding_window")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
# Under which of these keys a family counts its experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# A null that says something: with it dropped, transformers would put its own number there.
NULLABLE = ("sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping")
# Keys that change the forward pass, each with the value at which it changes nothing; no other is taken.
NEUTRAL = {"use_bidirectional_attention": False}

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ROPE_INTEGERS = {"original_max_position_embeddings": (1, MAX_POSITION)}
ROPE_NUMBERS: dict[str, tuple[float, float]] = {
    "rope_theta": NUMBERS["rope_theta"],
    "partial_rotary_factor": NUMBERS["partial_rotary_factor"],
    "factor": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "beta_fast": (0.0, 1e6),
    "beta_slow": (0.0, 1e6),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
}
ROPE_FLAGS = ("truncate", "mrope_interleaved")
ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def text_values(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a text model's configuration, null ones left out but for those that mean something.

    Args:
        config: ``config.json``, or its ``text_config``. where: what to call it in an error.

    Raises:
        CheckpointError: a value of the wrong type, out of its bounds, or at odds with another.
    """
    fields = ConfigFields(config, where)
    found: dict[str, Any] = {key: None for key in NULLABLE if key in config}
    found |= _typed(fields, INTEGERS, NUMBERS, FLAGS)
    found |= {key: fields.word(key, ACTIVATIONS) for key in ACTIVATION_KEYS if fields.present(key)}
    for key, value in NEUTRAL.items():
        if fields.present(key) and fields.values[key] is not value:
            raise CheckpointError(f"{where}: {key} {shown(fields.values[key])} is not supported")
    if fields.present("layer_types"):
        found["layer_types"] = _layer_types(fields)
    if fields.present("mlp_only_layers"):
        layers = fields.optional_list("mlp_only_layers", MAX_LAYERS) or []
        found["mlp_only_layers"] = [fields.check_integer("mlp_only_layers", at, 0, MAX_LAYERS) for at in layers]
    for key in ("rope_parameters", "rope_scaling"):
        if rope := fields.inner(key):
            found[key] = _rope(rope, f"{where}: {key}")
    _check_together(found, where)
    return found


def _typed(
    fields: ConfigFields,
    integers: Mapping[str, tuple[int, int]],
    numbers: Mapping[str, tuple[float, float]],
    flags: Sequence[str],
) -> dict[str, Any]:
    """Return the values of these keys, as far as they are there."""
    found: dict[str, Any] = {key: fields.integer(key, *integers[key]) for key in integers if fields.present(key)}
    found |= {key: fields.number(key, *numbers[key]) for key in numbers if fields.present(key)}
    return found | {key: fields.optional_flag(key) for key in flags if fields.present(key)}


def _layer_types(fields: ConfigFields) -> list[str]:
    types = fields.optional_list("layer_types", MAX_LAYERS) or []
    for kind in types:
        if kind not in LAYER_TYPES:
            wrong = f"{fields.where}: layer type {shown(kind)} is not supported"
            raise CheckpointError(wrong, f"supported: {', '.join(LAYER_TYPES)}")
    layers = fields.optional_integer("num_hidden_layers", *INTEGERS["num_hidden_layers"])
    if types and layers is not None and len(types) != layers:
        raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries for {layers} layers")
    return types


def _rope(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return flat settings; those told per layer type must agree, as with one rotary embedding for all layers."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise CheckpointError(f"{where} differ by layer type, which is not supported")
        rope = nested[0]
    fields = ConfigFields(rope, where)
    key = "rope_type" if fields.present("rope_type") else "type"
    kind = fields.word(key, ROPE_KINDS) if fields.present(key) else "default"
    found = {"rope_type": kind, **_typed(fields, ROPE_INTEGERS, ROPE_NUMBERS, ROPE_FLAGS)}
    for name in ("short_factor", "long_factor"):
        if fields.present(name):
            numbers = fields.optional_list(name, MAX_HEADS) or []
            found[name] = [ConfigFields({name: item}, where).number(name, 1e-6, 1e6) for item in numbers]
    if fields.present("mrope_section"):
        section = fields.optional_list("mrope_section", 3) or []
        found["mrope_section"] = [fields.check_integer("mrope_section", part, 0, MAX_HEADS) for part in section]
        if len(section) != 3:
            raise CheckpointError(f"{where}: mrope_section must have 3 entries, got {len(section)}")
    return found


def check_rope(values: Mapping[str, Any], where: str) -> None:
    """See that the rotary embedding has what its kind needs: not of a shape known in part. CheckpointError."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    for name in ROPE_NEEDS.get(kind, ()):
        if name not in rope:
            raise ConfigFields({}, f"{where}: rope").missing(name)
    name = "original_max_position_embeddings"
    if kind in ("yarn", "longrope", "llama3") and name not in rope and "max_position_embeddings" not in values:
        raise ConfigFields({}, f"{where}: rope").missing(name)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise CheckpointError(f"{where}: low_freq_factor must be below high_freq_factor")
    width = values.get("qk_rope_head_dim") or values.get("head_dim")
    if width is None and values.get("num_attention_heads"):
        width = values["hidden_size"] // values["num_attention_heads"]
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    if width is not None and (int(width * share) < 2 or int(width * share) % 2):
        raise CheckpointError(f"{where}: {int(width * share)} dimensions of a head turn; rotary embedding needs pairs")


def _check_together(found: Mapping[str, Any], where: str) -> None:
    """Refuse numbers of which one must be a multiple, or no more, of the other."""
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("n_routed_experts", "n_group"),
    ):
        if found.get(many) and found.get(few) and found[many] % found[few]:
            raise CheckpointError(f"{where}: {many} {found[many]} is not a multiple of {few} {found[few]}")
    experts = next((found[key] for key in EXPERT_COUNTS if key in found), 0)
    for small, large, most in (
        ("num_experts_per_tok", "experts", experts),
        ("topk_group", "n_group", found.get("n_group")),
    ):
        if most and found.get(small, 0) > most:
            raise CheckpointError(f"{where}: {small} {found[small]} is more than there are ({large} {most})")
