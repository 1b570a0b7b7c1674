"""A GGUF file's tensors under the names of the Hugging Face checkpoint, each with what its converter did to it.

Names: gguf-py/gguf/tensor_mapping.py of llama.cpp. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from dflash_local.checkpoint_files.gguf_config import LINEAR, TARGETS, config_of
from dflash_local.checkpoint_files.gguf_drafter import DFLASH
from dflash_local.checkpoint_files.gguf_header import GgufHeader
from dflash_local.checkpoint_files.gguf_keys import architecture_keys, architecture_of, block_count
from dflash_local.checkpoint_files.gguf_rope import FACTORS
from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.checkpoint_files.text_config import text_values
from dflash_local.checkpoint_files.undo import Interleave, SwapAxes, changes_of
from dflash_local.errors import CheckpointError

KINDS = ("weight", "bias")
IN_LAYER = re.compile(r"blk[.](\d+)[.](.+)")
AHEAD = "mtp."  # before the names of what predicts tokens further ahead, which is left alone
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GATED_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
LAYERS = {
    "llama": DENSE,
    "qwen3": DENSE,
    "qwen3moe": DENSE | ROUTER,
    "qwen3next": DENSE | ROUTER | SHARED | GATED_DELTA_NET,
    "qwen35": DENSE | GATED_DELTA_NET,
    "qwen35moe": DENSE | ROUTER | SHARED | GATED_DELTA_NET,
    "gpt-oss": DENSE | GPT_OSS,
}
GATED = ("qwen3next", "qwen35", "qwen35moe")  # their queries come with what gates the results
# Those that end in .weight or .bias on one side only.
WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "attn_sinks.weight": "self_attn.sinks"}
# All experts of a layer in one tensor, each with the matrices that its rows are.
STACKED = {
    "ffn_gate_exps": ("gate",),
    "ffn_up_exps": ("up",),
    "ffn_down_exps": ("down",),
    "ffn_gate_up_exps": ("gate", "up"),
}
DRAFTER_OUTSIDE = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
DRAFTER_LAYERS = DENSE | {
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
DRAFTER_WHOLE = {"attn_conv_base": "attention_conv.base_kernel", "ffn_conv_base": "mlp_conv.base_kernel"}


def hf_tensors(header: GgufHeader) -> dict[str, TensorInfo]:
    """Return all tensors by name; a layer's stacked experts as one tensor for each expert's matrix or bias.

    Raises:
        CheckpointError: as ``config_of``; a tensor is not known, or its shape does not fit the metadata.
    """
    architecture = architecture_of(header, (*TARGETS, DFLASH))
    config = config_of(header)
    if architecture == DFLASH:
        return _by_name(map(_drafter_tensor, header.tensors.values()))
    config = text_values(config, str(header.file))
    ahead = range(config["num_hidden_layers"], block_count(architecture_keys(header, architecture)))
    named = (_target_tensors(info, architecture, config, ahead) for info in header.tensors.values())
    found = _by_name(chain.from_iterable(named))
    if architecture == "qwen3next":
        found = _with_joined_projections(found, config)
    for each in found.values():
        _check_sizes(each)
    return found


def _by_name(named: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for info in named:
        if info.name in found:
            raise CheckpointError(f"{info.file}: two tensors are {info.name}", "take another file of this model")
        found[info.name] = info
    return found


def _drafter_tensor(info: TensorInfo) -> TensorInfo:
    place = IN_LAYER.fullmatch(info.name)
    own = None if place is None else _in_layer(place[2], DRAFTER_LAYERS, DRAFTER_WHOLE)
    name = DRAFTER_OUTSIDE.get(info.name) if place is None else own and f"layers.{place[1]}.{own}"
    if not name:
        raise _unknown(info, DFLASH)
    return replace(info, name=name)


def _target_tensors(
    info: TensorInfo, architecture: str, config: Mapping[str, Any], ahead: range
) -> Iterable[TensorInfo]:
    """Return what a tensor of the file is called, and what it is cut into where it holds several; ``ahead``: layers
    that predict tokens further ahead.
    """
    place = IN_LAYER.fullmatch(info.name)
    if place is None:
        return _outside(info, architecture, config)
    layer, own = int(place[1]), place[2]
    if layer in ahead:
        return [replace(info, name=f"{AHEAD}{info.name}")]
    if layer >= config["num_hidden_layers"]:
        raise _unknown(info, architecture)
    at, (stem, _, kind) = f"model.layers.{layer}", own.rpartition(".")
    if stem in STACKED and kind in KINDS and "ffn_gate_inp" in LAYERS[architecture]:
        return _experts(info, f"{at}.mlp.experts", STACKED[stem], kind)
    linear = "layer_types" in config and config["layer_types"][layer] == LINEAR
    if stem == "attn_qkv" and kind in KINDS and not linear:
        return _attention_inputs(info, f"{at}.self_attn", kind, architecture, config)
    name = _in_layer(own, LAYERS[architecture], WHOLE)
    if name is None:
        raise _unknown(info, architecture)
    undo = changes_of(own, architecture, config)
    return [replace(info, name=f"{at}.{name}", shape=_shape(own, info.shape), undo=undo)]


def _outside(info: TensorInfo, architecture: str, config: Mapping[str, Any]) -> list[TensorInfo]:
    if info.name == FACTORS and architecture == "llama":
        return []  # part of the configuration
    if info.name not in OUTSIDE:
        raise _unknown(info, architecture)
    return [replace(info, name=OUTSIDE[info.name], undo=changes_of(info.name, architecture, config))]


def _in_layer(own: str, stems: Mapping[str, str], whole: Mapping[str, str]) -> str | None:
    stem, _, kind = own.rpartition(".")
    return whole.get(own) or (f"{stems[stem]}.{kind}" if stem in stems and kind in KINDS else None)


def _shape(own: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with the axes of one element that files leave out."""
    if own == "ssm_conv1d.weight" and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return (1, *shape) if own == "ffn_gate_inp_shexp.weight" and len(shape) == 1 else shape


def _experts(info: TensorInfo, at: str, matrices: tuple[str, ...], kind: str) -> Iterator[TensorInfo]:
    """Cut a tensor [experts, rows, columns], or biases [experts, rows], into each expert's matrices."""
    if len(info.shape) != (3 if kind == "weight" else 2) or info.shape[1] % len(matrices) or not info.nbytes:
        raise _misshapen(info)
    experts, rows, *columns = info.shape
    pieces = experts * len(matrices)
    for number in range(pieces):
        expert, matrix = divmod(number, len(matrices))
        yield replace(
            info,
            name=f"{at}.{expert}.{matrices[matrix]}_proj.{kind}",
            shape=(rows // len(matrices), *columns),
            offset=info.offset + info.nbytes // pieces * number,
        )


def _attention_inputs(
    info: TensorInfo, at: str, kind: str, architecture: str, config: Mapping[str, Any]
) -> Iterator[TensorInfo]:
    """Cut one tensor into queries, keys and values, which lie one below the other."""
    heads, keys, width = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    queries = heads * width * (2 if architecture in GATED else 1)
    rows = {"q": queries, "k": keys * width, "v": keys * width}
    if not info.shape or info.shape[0] != sum(rows.values()):
        raise _misshapen(info)
    offset = info.offset
    for letter, count in rows.items():
        undo = changes_of(f"attn_{letter}.{kind}", architecture, config)
        name, shape = f"{at}.{letter}_proj.{kind}", (count, *info.shape[1:])
        yield replace(info, name=name, shape=shape, offset=offset, undo=undo)
        offset += info.nbytes // info.shape[0] * count


def _with_joined_projections(found: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return Qwen3-Next's one projection for each layer, which the converter cuts in two and orders by kind of row."""
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    undo = (Interleave(keys, (width, width, values, values)),)
    joined: dict[str, TensorInfo] = {}
    for name, info in found.items():
        if name.endswith(".in_proj_qkv.weight"):
            gate = found.get(name.replace("in_proj_qkv", "in_proj_z"))
            if gate is None or len(info.shape) != 2 or gate.shape[1:] != info.shape[1:]:
                raise _misshapen(info)
            whole, shape = name.replace("in_proj_qkv", "in_proj_qkvz"), (info.shape[0] + gate.shape[0], info.shape[1])
            joined[whole] = replace(info, name=whole, shape=shape, undo=undo, parts=(info, gate))
        elif not name.endswith(".in_proj_z.weight"):
            joined[name] = info
    return joined


def _check_sizes(info: TensorInfo) -> None:
    """Raise CheckpointError where it has other rows or columns than are to be reordered."""
    for step in info.undo:
        if isinstance(step, SwapAxes):
            fits = step.axis < len(info.shape) and info.shape[step.axis] == step.start + step.size
        else:
            fits = not isinstance(step, Interleave) or info.shape[0] == step.size
        if not fits:
            raise _misshapen(info)


def _misshapen(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name} has shape {list(info.shape)}, which does not fit the file's metadata",
        "the file is damaged, or of another converter: download it again, or take the safetensors checkpoint",
    )


def _unknown(info: TensorInfo, architecture: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name} is not known in {architecture}: it may change what the model computes",
        "take the safetensors checkpoint, or another file of this model",
    )
