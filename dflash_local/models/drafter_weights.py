"""A drafter's tensors in the fused layout its forward wants, filled from a checkpoint or at random.

Checks names and shapes against the config before anything is allocated, then streams every tensor
straight to its place: at no time are there two copies of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter_tensors import check_tensors, target_hidden_of

Places = dict[str, list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. qkv: [q; k; v] rows; query_key_norm: [q heads + kv heads, head_dim]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_key_norm: torch.Tensor
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """The whole drafter.

    ``context_kv`` stacks the keys of all layers, then the values of all layers, [2 x layers x kv_dim,
    hidden], so that context costs one GEMM; these rows also stand in each layer's ``qkv`` (about 3 %
    more memory). ``context_key_norm``: [layers x kv heads, head_dim].
    """

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    context_kv: torch.Tensor
    context_kv_bias: torch.Tensor | None
    context_key_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [getattr(self, field.name) for field in fields(self) if field.name != "layers"]
        tensors += [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def read_weights(
    checkpoint: Checkpoint,
    config: DrafterConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_notice: Callable[[str], None],
) -> DrafterWeights:
    """Check, allocate, stream. ``on_notice`` hears of suspicious but usable tensors."""
    where = str(checkpoint.folder)
    target_hidden = target_hidden_of(checkpoint.tensors, config, where)
    check_tensors(checkpoint.tensors, config, target_hidden, where)
    weights, places = _allocate(config, target_hidden, device, dtype)
    checkpoint.fill(places, on_notice)
    return weights


def random_weights(
    config: DrafterConfig, target_hidden: int, seed: int, device: torch.device, dtype: torch.dtype
) -> DrafterWeights:
    """Random weights of sensible scale, a pure function of config and seed."""
    weights, places = _allocate(config, target_hidden, device, dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in config.tensor_shapes(target_hidden).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif len(shape) == 2:
            noise = noise / shape[1] ** 0.5
        for place in places[name]:
            place.copy_(noise)
    return weights


def random_on_device(
    config: DrafterConfig, target_hidden: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> DrafterWeights:
    """Random weights made where they lie, for measuring: norms are one, matrices keep the scale of their input."""
    weights, places = _allocate(config, target_hidden, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in config.tensor_shapes(target_hidden).items():
        for place in places[name]:
            if name.endswith("norm.weight") or len(shape) == 1:
                place.fill_(1.0)
            else:
                place.normal_(generator=generator).mul_(shape[1] ** -0.5)
    return weights


def _allocate(
    config: DrafterConfig, target_hidden: int, device: torch.device, dtype: torch.dtype
) -> tuple[DrafterWeights, Places]:
    """Uninitialised tensors in the fused layout, and where each tensor of the checkpoint goes."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden, num_layers = config.hidden_size, config.num_layers
    keys = config.num_kv_heads * config.head_dim
    weights = DrafterWeights(
        fc=empty(hidden, len(config.taps) * target_hidden),
        hidden_norm=empty(hidden),
        norm=empty(hidden),
        context_kv=empty(2 * num_layers * keys, hidden),
        context_kv_bias=empty(2 * num_layers * keys) if config.attention_bias else None,
        context_key_norm=empty(num_layers * config.num_kv_heads, config.head_dim),
        layers=tuple(_allocate_layer(config, empty) for _ in range(num_layers)),
    )
    places: Places = {
        "fc.weight": [weights.fc],
        "hidden_norm.weight": [weights.hidden_norm],
        "norm.weight": [weights.norm],
    }
    for index in range(num_layers):
        places |= _layer_places(config, weights, index)
    return weights, places


def _allocate_layer(config: DrafterConfig, empty: Callable[..., torch.Tensor]) -> LayerWeights:
    hidden, biased = config.hidden_size, config.attention_bias
    head_dim, num_heads = config.head_dim, config.num_heads
    fused = num_heads + 2 * config.num_kv_heads
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(fused * head_dim, hidden),
        qkv_bias=empty(fused * head_dim) if biased else None,
        query_key_norm=empty(num_heads + config.num_kv_heads, head_dim),
        output=empty(hidden, num_heads * head_dim),
        output_bias=empty(hidden) if biased else None,
        post_norm=empty(hidden),
        gate_up=empty(2 * config.intermediate_size, hidden),
        down=empty(hidden, config.intermediate_size),
    )


def _layer_places(config: DrafterConfig, weights: DrafterWeights, index: int) -> Places:
    """Where the checkpoint's tensors of one layer go, as views into the fused ones."""
    layer, at = weights.layers[index], f"layers.{index}"
    heads, kv_heads = config.num_heads, config.num_kv_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    key_rows = slice(index * keys, (index + 1) * keys)
    value_rows = slice((config.num_layers + index) * keys, (config.num_layers + index + 1) * keys)
    places: Places = {
        f"{at}.input_layernorm.weight": [layer.input_norm],
        f"{at}.post_attention_layernorm.weight": [layer.post_norm],
        f"{at}.self_attn.o_proj.weight": [layer.output],
        f"{at}.self_attn.q_norm.weight": [layer.query_key_norm[:heads]],
        f"{at}.self_attn.k_norm.weight": [
            layer.query_key_norm[heads:],
            weights.context_key_norm[index * kv_heads : (index + 1) * kv_heads],
        ],
        f"{at}.mlp.gate_proj.weight": [layer.gate_up[: config.intermediate_size]],
        f"{at}.mlp.up_proj.weight": [layer.gate_up[config.intermediate_size :]],
        f"{at}.mlp.down_proj.weight": [layer.down],
    }
    pairs = [("weight", layer.qkv, weights.context_kv)]
    if layer.qkv_bias is not None and weights.context_kv_bias is not None and layer.output_bias is not None:
        pairs.append(("bias", layer.qkv_bias, weights.context_kv_bias))
        places[f"{at}.self_attn.o_proj.bias"] = [layer.output_bias]
    for kind, fused, context in pairs:
        places[f"{at}.self_attn.q_proj.{kind}"] = [fused[:queries]]
        places[f"{at}.self_attn.k_proj.{kind}"] = [fused[queries : queries + keys], context[key_rows]]
        places[f"{at}.self_attn.v_proj.{kind}"] = [fused[queries + keys :], context[value_rows]]
    return places
