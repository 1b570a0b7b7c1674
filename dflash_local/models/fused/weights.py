"""A dense target's tensors in the layout its forward wants, streamed from a checkpoint straight to their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint, name_list
from dflash_local.models.fused.linear import GateUp, Linear
from dflash_local.models.fused.shape import TargetShape
from dflash_local.models.target_facts import TargetFacts

Places = dict[str, torch.Tensor]
HEADS_OF = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One decoder layer. qkv: rows of queries, keys, values; head_norms: of queries and keys, or None."""

    input_norm: torch.Tensor
    qkv: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: GateUp
    down: Linear

    @property
    def products(self) -> tuple[Linear | GateUp, ...]:
        """All its matrices."""
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The whole target; ``head`` may be the embedding itself."""

    embedding: torch.Tensor
    layers: tuple[AttentionLayer, ...]
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
    for count, (name, tensor) in enumerate(checkpoint.read(names=names), 1):
        places[name].copy_(tensor)
        on_fraction(count / len(names))
    return weights


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
    return weights


def _is_ours(name: str, facts: TargetFacts) -> bool:
    """True for the text model's tensors; towers and further heads of a checkpoint are left alone."""
    if name in HEADS_OF:
        return not facts.tied
    return name.startswith(facts.prefix) and not name.endswith("rotary_emb.inv_freq")


def allocate(
    facts: TargetFacts, shape: TargetShape, device: torch.device, dtype: torch.dtype
) -> tuple[TargetWeights, Places]:
    """Uninitialised weights, and where each tensor of a checkpoint goes."""

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=device, dtype=dtype)

    places: Places = {}
    embedding = places[f"{facts.prefix}embed_tokens.weight"] = empty(facts.embedding_rows, shape.hidden)
    norm = places[f"{facts.prefix}norm.weight"] = empty(shape.hidden)
    head = embedding
    if not facts.tied:
        head = empty(facts.embedding_rows, shape.hidden)
        places[HEADS_OF[1] if facts.prefix.startswith("language_model.") else HEADS_OF[0]] = head
    layers = tuple(_layer(f"{facts.prefix}layers.{index}", shape, empty, places) for index in range(shape.layers))
    return TargetWeights(embedding, layers, norm, Linear(head)), places


def _layer(at: str, shape: TargetShape, empty: Callable[..., torch.Tensor], places: Places) -> AttentionLayer:
    heads, hidden, inner = shape.heads, shape.hidden, shape.inner
    wide, narrow = heads.queries * heads.width, heads.keys * heads.width
    qkv, gate_up = empty(heads.columns, hidden), empty(2 * inner, hidden)
    layer = AttentionLayer(
        input_norm=empty(hidden),
        qkv=Linear(qkv),
        head_norms=(empty(heads.width), empty(heads.width)) if shape.head_norms else None,
        output=Linear(empty(hidden, wide)),
        post_norm=empty(hidden),
        gate_up=GateUp(gate_up),
        down=Linear(empty(hidden, inner)),
    )
    places[f"{at}.input_layernorm.weight"] = layer.input_norm
    places[f"{at}.post_attention_layernorm.weight"] = layer.post_norm
    for name, rows in (("q", qkv[:wide]), ("k", qkv[wide : wide + narrow]), ("v", qkv[wide + narrow :])):
        places[f"{at}.self_attn.{name}_proj.weight"] = rows
    if layer.head_norms is not None:
        places[f"{at}.self_attn.q_norm.weight"], places[f"{at}.self_attn.k_norm.weight"] = layer.head_norms
    places[f"{at}.self_attn.o_proj.weight"] = layer.output.weight
    places[f"{at}.mlp.gate_proj.weight"], places[f"{at}.mlp.up_proj.weight"] = gate_up[:inner], gate_up[inner:]
    places[f"{at}.mlp.down_proj.weight"] = layer.down.weight
    return layer
