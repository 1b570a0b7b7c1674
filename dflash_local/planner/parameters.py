"""How many parameters a shape has, group by group, exactly as transformers and our drafter allocate them.

None where the shape lacks a number it needs. Knows nothing of bytes per weight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dflash_local.planner.shape import GATED_ATTENTION, LINEAR, QK_NORM, DrafterShape, Experts, TargetShape


class Unknown(Exception):
    """A number the sum needs is not known."""


def known(value: int | None) -> int:
    """The number, or the end of the sum.

    Raises:
        Unknown: it is None.
    """
    if value is None:
        raise Unknown
    return value


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a target's text model. ``head`` is 0 when it is the embedding.

    Attributes:
        linear: the Gated-DeltaNet layers but for their decay projections, which ``whole`` holds.
        mlp: dense feed-forward parts and shared experts. experts: the routed ones, biases included.
        whole: matrices that stay unquantised whatever the format (decay projections, routers).
        vectors: norms, biases, convolution and other one-dimensional weights.
    """

    embedding: int
    head: int
    attention: int
    linear: int
    mlp: int
    experts: int
    whole: int
    vectors: int

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def quantisable(self) -> int:
        """Weights of the linear layers that bitsandbytes replaces in a dense model."""
        return self.attention + self.linear + self.mlp


def target_parameters(shape: TargetShape) -> Parameters | None:
    """The target's parameters; None when the family or a size is unknown."""
    try:
        return _target(shape)
    except Unknown:
        return None


def drafter_parameters(shape: DrafterShape) -> int | None:
    """Parameters of a drafter's file."""
    try:
        return _drafter(shape)
    except Unknown:
        return None


def drafter_resident(shape: DrafterShape) -> int | None:
    """Parameters a loaded drafter holds: the K and V projections and key norms of all layers stand twice."""
    try:
        layers, keys = known(shape.layers), known(shape.kv_heads) * known(shape.head_dim)
        twice = 2 * layers * keys * known(shape.hidden) + (2 * layers * keys if shape.biased else 0)
        # One norm row per head instead of one per layer; the keys' rows stand in both places.
        heads = known(shape.heads) + 2 * known(shape.kv_heads)
        norms = layers * (heads - 2) * known(shape.head_dim)
        return _drafter(shape) + twice + norms
    except Unknown:
        return None


def mtp_parameters(shape: TargetShape) -> int | None:
    """Parameters of one published multi-token-prediction layer (Qwen3.5): downloaded, never loaded."""
    if shape.family not in ("qwen3_5", "qwen3_5_moe"):
        return 0
    try:
        hidden = known(shape.hidden)
        attention, vectors = _attention(shape)
        feed, experts, whole = _feed_forward(shape, shape.experts)
        # fc joins the embedding and the hidden state; three norms of its own, two of the layer.
        return 2 * hidden * hidden + attention + vectors + feed + experts + whole + 5 * hidden
    except Unknown:
        return None


def _target(shape: TargetShape) -> Parameters:
    if shape.family is None or not shape.kinds:
        raise Unknown
    hidden, vocab = known(shape.hidden), known(shape.vocab)
    attention = linear = mlp = experts = whole = 0
    vectors = hidden  # the final norm
    for index, kind in enumerate(shape.kinds):
        if kind == LINEAR:
            mixed, kept, small = _linear(shape)
            linear, whole = linear + mixed, whole + kept
        else:
            mixed, small = _attention(shape)
            attention += mixed
        held = shape.experts if shape.experts and index >= shape.experts.dense_layers else None
        feed, routed, router = _feed_forward(shape, held)
        mlp, experts, whole = mlp + feed, experts + routed, whole + router
        vectors += small + 2 * hidden
    return Parameters(
        vocab * hidden, 0 if shape.tied else vocab * hidden, attention, linear, mlp, experts, whole, vectors
    )


def _attention(shape: TargetShape) -> tuple[int, int]:
    """Matrices and vectors of one attention layer."""
    if shape.latent is not None:
        return _latent_attention(shape)
    hidden, head = known(shape.hidden), known(shape.head_dim)
    queries, keys = known(shape.heads) * head, known(shape.kv_heads) * head
    asked = 2 * queries if shape.family in GATED_ATTENTION else queries  # the gate comes with the query
    matrices = hidden * (asked + 2 * keys) + queries * hidden
    vectors = 2 * head if shape.family in QK_NORM else 0
    if shape.biased:
        vectors += asked + 2 * keys + hidden
    if shape.family == "gpt_oss":
        vectors += known(shape.heads)  # attention sinks
    return matrices, vectors


def _latent_attention(shape: TargetShape) -> tuple[int, int]:
    if shape.latent is None:
        raise Unknown
    part, hidden, heads = shape.latent, known(shape.hidden), known(shape.heads)
    query = hidden * part.query_rank + part.query_rank * heads * (part.nope + part.rope)
    keys = hidden * (part.kv_rank + part.rope) + part.kv_rank * heads * (part.nope + part.value)
    return query + keys + heads * part.value * hidden, part.query_rank + part.kv_rank


def _linear(shape: TargetShape) -> tuple[int, int, int]:
    """Matrices, decay projections and vectors of one Gated-DeltaNet layer."""
    part, hidden = shape.linear, known(shape.hidden)
    if part is None:
        raise Unknown
    values = part.value_heads * part.value_dim
    matrices = hidden * (part.channels + values) + values * hidden
    vectors = part.channels * part.kernel + 2 * part.value_heads + part.value_dim
    return matrices, 2 * hidden * part.value_heads, vectors


def _feed_forward(shape: TargetShape, experts: Experts | None) -> tuple[int, int, int]:
    """Dense or shared matrices, routed experts, router and shared gate of one layer."""
    hidden = known(shape.hidden)
    if experts is None:
        return 3 * hidden * known(shape.width), 0, 0
    routed = 3 * hidden * experts.width
    router = experts.count * hidden
    if shape.family == "gpt_oss":
        routed += 2 * experts.width + hidden
        router += experts.count
    shared = 3 * hidden * experts.shared
    if shape.family in ("qwen3_next", "qwen3_5_moe"):
        router += hidden  # the shared expert's gate
    return shared, experts.count * routed, router


def _drafter(shape: DrafterShape) -> int:
    hidden, head = known(shape.hidden), known(shape.head_dim)
    queries, keys = known(shape.heads) * head, known(shape.kv_heads) * head
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * known(shape.width) + 2 * hidden + 2 * head
    if shape.biased:
        layer += queries + 2 * keys + hidden
    return known(shape.taps) * known(shape.target_hidden) * hidden + 2 * hidden + known(shape.layers) * layer
