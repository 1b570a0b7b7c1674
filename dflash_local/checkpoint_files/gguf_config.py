"""A GGUF file's metadata as the config.json that it was converted from; what cannot be said there is refused by name.

Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_local.checkpoint_files.config_values import ConfigFields
from dflash_local.checkpoint_files.gguf_drafter import DFLASH, drafter_config
from dflash_local.checkpoint_files.gguf_header import GgufHeader
from dflash_local.checkpoint_files.gguf_keys import (
    architecture_keys,
    architecture_of,
    common_values,
    layer_flags,
    refuse_others,
    values_of,
)
from dflash_local.checkpoint_files.text_config import LAYER_TYPES, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from dflash_local.errors import CheckpointError

FULL, SLIDING, LINEAR = LAYER_TYPES
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
GPT_OSS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
    "attention.sliding_window": "sliding_window",
}
RECURRENT = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
# What a converter does not write, and every published checkpoint of the architecture has.
ALL_SPARSE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
DTYPES = {"F32": "float32", "F16": "float16"}  # other types are computed in bfloat16
# Tokens that end a reply wherever a vocabulary has them, as llama.cpp has it: a file names only one id.
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|return|>", "<|call|>")
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
CONTROL = 3  # of token types
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture of targets.

    Attributes:
        name, model_type: of its config.json. keys: beside the common ones. fixed: values that no key tells.
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recurrent(self) -> bool:
        return "ssm.conv_kernel" in self.keys

    @property
    def windowed(self) -> bool:
        return "attention.sliding_window" in self.keys


TARGETS = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, ALL_SPARSE),
    "qwen3next": GgufArchitecture("Qwen3NextForCausalLM", "qwen3_next", EXPERTS | SHARED | RECURRENT, ALL_SPARSE),
    "qwen35": GgufArchitecture("Qwen3_5ForCausalLM", "qwen3_5_text", RECURRENT),
    "qwen35moe": GgufArchitecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", EXPERTS | SHARED | RECURRENT),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", "gpt_oss", GPT_OSS),
}
OF_RECURRENT = ("ssm.inner_size", "full_attention_interval", "attention.recurrent_layers")
OF_WINDOWED = ("attention.sliding_window_pattern",)


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return what the config.json of a target or of a DFlash drafter would hold.

    Raises:
        CheckpointError: the architecture is not known, a value is missing or wrong, or a key says what a config.json
            of this program cannot say; names the file and the key.
    """
    architecture = architecture_of(header, (*TARGETS, DFLASH))
    keys = architecture_keys(header, architecture)
    if architecture == DFLASH:
        return drafter_config(header, keys)
    target = TARGETS[architecture]
    own = {*target.keys, *(OF_RECURRENT if target.recurrent else ()), *(OF_WINDOWED if target.windowed else ())}
    refuse_others(keys, own)
    for key in target.keys:
        keys.required(key)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.file} has no embedding (token_embd.weight)", "give the model's own GGUF file")
    found = {
        "architectures": [target.name],
        "model_type": target.model_type,
        **common_values(keys, header, partial=target.recurrent),
        **values_of(keys, target.keys),
        **target.fixed,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in header.tensors),
        "dtype": _dtype(header),
        **_token_ids(header),
    }
    if target.recurrent:
        found |= _recurrent(keys, found["num_hidden_layers"])
    if target.windowed:
        found |= {"layer_types": _windowed(keys, found["num_hidden_layers"])}
    if target.model_type == "llama":
        found["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    if target.model_type == "gpt_oss" and found["rope_parameters"]["rope_type"] == "yarn":
        # No key tells whether YaRN's bounds are rounded to whole dimensions. llama.cpp always rounds; gpt-oss's makers
        # do not, and their config.json says so.
        found["rope_parameters"]["truncate"] = False
    return found


def generation_of(header: GgufHeader) -> dict[str, Any]:
    """Return what generation_config.json would hold: ids that end a reply, and the makers' recommended sampling."""
    advised = values_of(ConfigFields(header.metadata, str(header.file)), SAMPLING)
    return {**_token_ids(header), **advised, **({"do_sample": True} if advised else {})}


def _recurrent(keys: ConfigFields, layers: int) -> dict[str, Any]:
    """Return layers and the value heads' width of Gated DeltaNet."""
    width, heads = keys.integer("ssm.inner_size", 1, MAX_WIDTH), keys.integer("ssm.time_step_rank", 1, MAX_WIDTH)
    every = keys.optional_integer("full_attention_interval", 1, MAX_LAYERS) or 4
    flags = layer_flags(keys, "attention.recurrent_layers", layers)
    if flags is None:
        flags = [bool((layer + 1) % every) for layer in range(layers)]
    kinds = [LINEAR if flag else FULL for flag in flags]
    return {"linear_value_head_dim": width // heads, "layer_types": kinds, "full_attention_interval": every}


def _windowed(keys: ConfigFields, layers: int) -> list[str]:
    """Return layer types by flags, or with every so many-th layer full: by default every second."""
    name = "attention.sliding_window_pattern"
    if isinstance(keys.values.get(name), list):
        flags = layer_flags(keys, name, layers) or [False] * layers
    else:
        every = keys.optional_integer(name, 1, MAX_LAYERS) or 2
        flags = [bool((layer + 1) % every) for layer in range(layers)]
    return [SLIDING if flag else FULL for flag in flags]


def _dtype(header: GgufHeader) -> str:
    """Return the dtype in which most bytes are stored, or in which what blocks stand for is computed."""
    sizes: Counter[str] = Counter()
    for info in header.tensors.values():
        sizes[info.dtype] += info.nbytes
    return DTYPES.get(max(sizes, key=sizes.__getitem__), "bfloat16")


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    """Return ``bos_token_id``, and every id that ends a reply."""
    keys = ConfigFields(header.metadata, str(header.file))
    found = {
        id_
        for name in END_IDS
        if (id_ := keys.optional_integer(f"tokenizer.ggml.{name}", 0, 2**32 - 1)) is not None and id_ < MAX_VOCAB
    }
    tokens = keys.optional_list("tokenizer.ggml.tokens", MAX_VOCAB) or []
    types = keys.optional_list("tokenizer.ggml.token_type", MAX_VOCAB) or []
    found |= {id_ for id_, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and token in ENDS}
    bos = keys.optional_integer("tokenizer.ggml.bos_token_id", 0, 2**32 - 1)
    return {"bos_token_id": bos, "eos_token_id": sorted(found)}
