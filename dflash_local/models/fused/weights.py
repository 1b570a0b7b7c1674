"""A target's tensors in the layout its forward wants, streamed from a checkpoint straight to their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.errors import CheckpointError
from dflash_local.kernels.delta_step import GatedDeltaWeights
from dflash_local.models.checkpoint import Checkpoint, name_list
from dflash_local.models.fused.linear import GateUp, Linear
from dflash_local.models.fused.shape import TargetShape
from dflash_local.models.target_facts import TargetFacts

Places = dict[str, torch.Tensor]
HEADS_OF = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One decoder layer. qkv: rows of queries, keys, values; qk_norms: of queries and keys, or None."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: GateUp
    down: Linear

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """All its matrices."""
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class GatedDeltaLayer:
    """A decoder layer with Gated-DeltaNet as its mixer. in_proj: rows of q, k, v, z, b, a; norm: of its gated norm."""

    input_norm: torch.Tensor
    in_proj: Linear
    delta: GatedDeltaWeights
    norm: torch.Tensor
    output: Linear
    post_norm: torch.Tensor
    gate_up: GateUp
    down: Linear

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """All its matrices."""
        return (self.in_proj, self.output, self.gate_up, self.down)


Layer = AttentionLayer | GatedDeltaLayer


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The whole target; ``head`` may be the embedding itself."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """All matrices of the layers."""
        return tuple(product for layer in self.layers for product in layer.products)


def read_weights(
    checkpoint: Checkpoint,
    facts: TargetFacts,
    shape: TargetShape,
    device: torch.device,
    dtype: torch.dtype,
    on_fraction: Callable[[float], None] = lambda _: None,
) -> TargetWeights:
    """Allocate, then stream; beside the weights at most one tensor is held.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape or not finite.
    """
    weights, places = allocate(facts, shape, device, dtype)
    names = [name for name in checkpoint.tensors if _is_ours(name, facts)]
    missing, left = set(places) - set(names), set(names) - set(places)
    if missing:
        raise CheckpointError(f"{checkpoint.folder} lacks the tensor {name_list(missing)}")
    if left:
        raise CheckpointError(f"{checkpoint.folder} has tensors that this family does not know: {name_list(left)}")
    for name in names:
        found, wanted = checkpoint.tensors[name].shape, tuple(places[name].shape)
        if found != wanted:
            raise CheckpointError(
                f"{checkpoint.tensors[name].file}: tensor {name} has shape {list(found)}, expected {list(wanted)}"
            )
    checkpoint.fill({name: [places[name]] for name in names}, on_fraction=on_fraction)
    _finish(weights, shape)
    return weights


def _finish(weights: TargetWeights, shape: TargetShape) -> None:
    """What is stored one way and used another: norms that count from zero, rates as logarithms."""
    if shape.norm_plus_one:
        for layer in weights.layers:
            qk_norms = layer.qk_norms or () if isinstance(layer, AttentionLayer) else ()
            for norm in (layer.input_norm, layer.post_norm, *qk_norms):
                norm.add_(1.0)
        weights.norm.add_(1.0)
    for layer in weights.layers:
        if isinstance(layer, GatedDeltaLayer):
            layer.delta.rate.exp_().neg_()


def random_weights(
    facts: TargetFacts, shape: TargetShape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> TargetWeights:
    """Weights of the true shape and of sensible scale, made where they lie: for measuring without a download."""
    weights, places = allocate(facts, shape, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, place in places.items():
        if place.dim() == 1:
            place.fill_(1.0)
        else:
            place.normal_(generator=generator).mul_(place.shape[1] ** -0.5)
        if name.endswith("embed_tokens.weight"):
            place.mul_(place.shape[1] ** 0.5)
        if name.endswith(("A_log", "dt_bias")) or (shape.norm_plus_one and name.endswith("norm.weight")):
            place.fill_(1.0 if "linear_attn" in name and name.endswith("norm.weight") else 0.0)
    _finish(weights, shape)
    return weights


def _is_ours(name: str, facts: TargetFacts) -> bool:
    """True for the text model's tensors; towers and further heads of a checkpoint are left alone."""
    if name in HEADS_OF:
        return not facts.model.tie_word_embeddings
    return name.startswith(facts.prefix) and not name.endswith("rotary_emb.inv_freq")


def allocate(
    facts: TargetFacts, shape: TargetShape, device: torch.device, dtype: torch.dtype
) -> tuple[TargetWeights, Places]:
    """Uninitialised weights, and where each tensor of a checkpoint goes."""

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=device, dtype=dtype)

    def norm_weight(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=device, dtype=torch.float32 if shape.norm_plus_one else dtype)

    places: Places = {}
    embedding = places[f"{facts.prefix}embed_tokens.weight"] = empty(facts.embedding_rows, shape.hidden_size)
    norm = places[f"{facts.prefix}norm.weight"] = norm_weight(shape.hidden_size)
    head = embedding
    if not facts.model.tie_word_embeddings:
        head = empty(facts.embedding_rows, shape.hidden_size)
        places[HEADS_OF[1] if facts.prefix.startswith("language_model.") else HEADS_OF[0]] = head
    layers: list[Layer] = []
    for index, kind in enumerate(shape.layer_types):
        build = _delta_layer if kind == "delta" else _attention_layer
        layers.append(build(f"{facts.prefix}layers.{index}", shape, empty, norm_weight, places))
    return TargetWeights(embedding, tuple(layers), norm, Linear(head)), places


Empty = Callable[..., torch.Tensor]


def _common(at: str, shape: TargetShape, empty: Empty, norm_weight: Empty, places: Places) -> dict[str, Any]:
    """What every layer has."""
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    gate_up, down = empty(2 * intermediate, hidden), empty(hidden, intermediate)
    norms = (norm_weight(hidden), norm_weight(hidden))
    places[f"{at}.input_layernorm.weight"], places[f"{at}.post_attention_layernorm.weight"] = norms
    places[f"{at}.mlp.gate_proj.weight"] = gate_up[:intermediate]
    places[f"{at}.mlp.up_proj.weight"] = gate_up[intermediate:]
    places[f"{at}.mlp.down_proj.weight"] = down
    return {"input_norm": norms[0], "post_norm": norms[1], "gate_up": GateUp(gate_up), "down": Linear(down)}


def _attention_layer(at: str, shape: TargetShape, empty: Empty, norm_weight: Empty, places: Places) -> AttentionLayer:
    heads, hidden = shape.heads, shape.hidden_size
    query_size = heads.num_heads * heads.head_dim * (2 if heads.gated else 1)
    kv_size = heads.num_kv_heads * heads.head_dim
    qkv, output = empty(heads.qkv_size, hidden), empty(hidden, heads.num_heads * heads.head_dim)
    for name, rows in (
        ("q", qkv[:query_size]),
        ("k", qkv[query_size : query_size + kv_size]),
        ("v", qkv[query_size + kv_size :]),
    ):
        places[f"{at}.self_attn.{name}_proj.weight"] = rows
    places[f"{at}.self_attn.o_proj.weight"] = output
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    if shape.qk_norm:
        qk_norms = (norm_weight(heads.head_dim), norm_weight(heads.head_dim))
        places[f"{at}.self_attn.q_norm.weight"], places[f"{at}.self_attn.k_norm.weight"] = qk_norms
    common = _common(at, shape, empty, norm_weight, places)
    return AttentionLayer(qkv=Linear(qkv), qk_norms=qk_norms, output=Linear(output), **common)


def _delta_layer(at: str, shape: TargetShape, empty: Empty, norm_weight: Empty, places: Places) -> GatedDeltaLayer:
    if shape.delta is None:
        raise ValueError("a delta layer without its shape")
    config, hidden = shape.delta, shape.hidden_size
    at_mixer = f"{at}.linear_attn"
    in_proj = empty(config.projection_size, hidden)
    output = empty(hidden, config.value_size)
    conv = empty(config.conv_dim, config.conv_kernel_size)
    parts = in_proj.split((config.conv_dim, config.value_size, config.num_value_heads, config.num_value_heads))
    for name, rows in zip(("qkv", "z", "b", "a"), parts):
        places[f"{at_mixer}.in_proj_{name}.weight"] = rows
    norm = empty(config.value_head_dim)
    rate, bias = (torch.empty(config.num_value_heads, device=in_proj.device, dtype=torch.float32) for _ in range(2))
    places[f"{at_mixer}.conv1d.weight"], places[f"{at_mixer}.norm.weight"] = conv.unsqueeze(1), norm
    places[f"{at_mixer}.A_log"], places[f"{at_mixer}.dt_bias"] = rate, bias
    places[f"{at_mixer}.out_proj.weight"] = output
    common = _common(at, shape, empty, norm_weight, places)
    delta = GatedDeltaWeights(conv, rate, bias)
    return GatedDeltaLayer(in_proj=Linear(in_proj), delta=delta, norm=norm, output=Linear(output), **common)
