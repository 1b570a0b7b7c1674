"""What a drafter is and which tensors it must have, read from a config.json; every number bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files import text_config
from dflash_local.checkpoint_files.config_values import Fields, shown
from dflash_local.checkpoint_files.text_config import MAX_HEADS, MAX_POSITION, MAX_VOCAB, MAX_WIDTH, MAX_WINDOW
from dflash_local.config.dflash2 import ARCHITECTURE as DFLASH2
from dflash_local.config.dflash2 import DFlash2Config
from dflash_local.config.dspark import ARCHITECTURES as DSPARK
from dflash_local.config.dspark import NOT_SUPPORTED as NOT_OF_DSPARK
from dflash_local.config.dspark import DSparkConfig
from dflash_local.config.families import FIRST_SLIDING, FULL, SLIDING
from dflash_local.config.features import AttentionConfig, MLPConfig
from dflash_local.config.quantization import Quantization
from dflash_local.config.quantizers import READ, read_quantization
from dflash_local.config.rope_parameters import RopeParameters
from dflash_local.config.values import fill
from dflash_local.errors import CheckpointError

ARCHITECTURES = ("DFlashDraftModel", DFLASH2, *DSPARK)
# Relatives with other forward passes, and of DSpark those of other layers.
RELATIVES = {"dspark": "a dspark drafter of other layers", "domino": "a domino drafter", "eagle": "an EAGLE drafter"}
MIN_BLOCK, MAX_BLOCK = 2, 64
MAX_LAYERS, MAX_TAPS = 128, 64
# Options of other trainers that change the forward pass, with the value at which they change nothing.
NOT_SUPPORTED = {"sample_from_anchor": False, "noise_embed_scale": 1}
NOT_OF_DFLASH = {"output_multiplier": 1}  # which a DFlash 2 drafter may have
# Where no source tells how positions rotate: no size depends on it.
PLAIN_ROPE = {"rope_theta": 1e7}
# What sizes and limits depend on, and what is therefore noted where it is only likely.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "attention_bias", "block_size", "target_layer_ids", "layer_types", "sliding_window"),
    "max_position_embeddings",
)
DSPARK_SIZES = ("vocab_size", "markov_rank", "enable_confidence_head", "confidence_head_with_markov")
DFLASH2_SIZES = ("vocab_size", "conv_kernel_size", "conv_group_size", "selector_rank")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The shape and behaviour of one drafter.

    Attributes:
        windows: per layer, how many keys a row sees including its own; None is all.
        causal: per layer, whether a row of the block is blind to later rows of the block.
        block_size: rows that are verified of a trained block, anchor included.
        taps: 0-based target layers whose outputs are concatenated, in this order.
        vocab_size, max_position_embeddings, num_target_layers, target_hidden_size: None if not said.
        dflash2, dspark: what a DFlash 2 and a DSpark drafter have beside; None for others.
        quantization: how its file holds its matrices; None for plain ones.
        source: where it was read, for messages. inferred: of the values that sizes and limits depend on, names of those
            that are likely but quoted by no source.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    attention_bias: bool
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    rope: RopeParameters
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    dflash2: DFlash2Config | None = None
    dspark: DSparkConfig | None = None
    quantization: Quantization | None = None
    source: str = ""
    inferred: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, config: Mapping[str, Any], source: Path | str) -> DrafterConfig:
        """Read a ``config.json``; ``dflash_config`` comes first. Raises UnknownValue, CheckpointError."""
        where = str(source)
        architecture = check_architecture(config, where)
        is_dflash2, is_dspark = architecture == DFLASH2, architecture in DSPARK
        nested = Fields(config, where).inner("dflash_config")
        fields = Fields({**config, **{k: v for k, v in nested.items() if v is not None}}, where)
        not_of_others = NOT_SUPPORTED if is_dflash2 else NOT_SUPPORTED | NOT_OF_DFLASH
        _refuse_variants(fields, NOT_OF_DSPARK if is_dspark else not_of_others)
        layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        heads, kv_heads, head_dim = _heads(fields, hidden)
        types, windows, causal = _attention_pattern(fields, Fields(config, where), Fields(nested, where), layers)
        eps = fields.optional_number("rms_norm_eps", 1e-12, 0.1)
        anchor = int(is_dspark)  # whose own block_size counts drafts
        block = fields.integer("block_size", MIN_BLOCK - anchor, MAX_BLOCK - anchor) + anchor
        return cls(
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 1, 4 * MAX_WIDTH),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-6 if eps is None else eps,
            layer_types=types,
            windows=windows,
            causal=(False,) * layers if is_dspark else causal,
            attention_bias=bool(fields.optional_flag("attention_bias")),
            block_size=block,
            mask_token_id=fields.integer("mask_token_id", 0, MAX_VOCAB),
            taps=_taps(fields),
            rope=RopeParameters.from_json(config, where),
            vocab_size=fields.optional_integer("vocab_size", 1, MAX_VOCAB),
            max_position_embeddings=fields.optional_integer("max_position_embeddings", 1, MAX_POSITION),
            num_target_layers=fields.optional_integer("num_target_layers", 1, text_config.MAX_LAYERS),
            target_hidden_size=fields.optional_integer("target_hidden_size", 1, MAX_WIDTH),
            dflash2=DFlash2Config.from_fields(fields, hidden, block) if is_dflash2 else None,
            dspark=DSparkConfig.from_fields(fields, hidden) if is_dspark else None,
            quantization=_quantization(Fields(config, where)),
            source=where,
        )

    @classmethod
    def from_shape(cls, shape: Mapping[str, Any], source: str) -> DrafterConfig:
        """Read sizes of the registry's copy; ``_inferred`` has likely values. Raises as ``from_json``."""
        known, inferred = fill(shape)
        if not any(known.get(key) for key in ("rope_theta", "rope_parameters")):
            known |= PLAIN_ROPE
        found = cls.from_json(known, source)
        own = DFLASH2_SIZES if found.dflash2 is not None else DSPARK_SIZES if found.dspark is not None else ()
        return replace(found, inferred=tuple(sorted(inferred & {*SIZES, *own})))

    @property
    def first_draft(self) -> int:
        """The row of its block that predicts the token behind the anchor: of DSpark the anchor's own."""
        return int(self.dspark is None)

    @property
    def draft_rows(self) -> int:
        """Rows that it computes, the anchor's included: of DSpark one less than are verified."""
        return self.block_size - 1 + self.first_draft

    @property
    def mlp(self) -> MLPConfig:
        return MLPConfig(self.intermediate_size)

    def attention(self, layer: int) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.head_dim,
            qk_norm=True,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            sliding_window=self.windows[layer],
        )

    def with_attention_factor(self, attention_factor: float | None) -> DrafterConfig:
        """The same drafter with another rope amplitude; None changes nothing."""
        if attention_factor is None:
            return self
        return replace(self, rope=replace(self.rope, attention_factor=attention_factor))

    def tensor_shapes(self, target_hidden: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint by name: 3 + 11 per layer, 4 more with biases; of DFlash 2 and DSpark more."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.taps) * target_hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (hidden,),
                f"{at}.post_attention_layernorm.weight": (hidden,),
                f"{at}.self_attn.q_proj.weight": (queries, hidden),
                f"{at}.self_attn.k_proj.weight": (keys, hidden),
                f"{at}.self_attn.v_proj.weight": (keys, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, queries),
                f"{at}.self_attn.q_norm.weight": (head,),
                f"{at}.self_attn.k_norm.weight": (head,),
                f"{at}.mlp.gate_proj.weight": (inner, hidden),
                f"{at}.mlp.up_proj.weight": (inner, hidden),
                f"{at}.mlp.down_proj.weight": (hidden, inner),
            }
            if self.attention_bias:
                shapes |= {
                    f"{at}.self_attn.q_proj.bias": (queries,),
                    f"{at}.self_attn.k_proj.bias": (keys,),
                    f"{at}.self_attn.v_proj.bias": (keys,),
                    f"{at}.self_attn.o_proj.bias": (hidden,),
                }
        if self.dflash2 is not None:
            shapes |= self.dflash2.tensor_shapes(self.num_layers, hidden)
        if self.dspark is not None:
            shapes |= self.dspark.tensor_shapes()
        return shapes

    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a checkpoint may have beside, and that drafting does without."""
        return {} if self.dspark is None else self.dspark.optional_shapes(self.hidden_size)

    def fingerprint(self) -> dict[str, object]:
        """The fields by which a registry distinguishes generations of one repository."""
        window = next((w for w in self.windows if w is not None), None)
        return {
            "layers": self.num_layers,
            "taps": list(self.taps),
            "mask_id": self.mask_token_id,
            "block": self.draft_rows,
            "window": window,
        }


def check_architecture(config: Mapping[str, Any], where: str) -> str:
    """The architecture by ``architectures``; ``auto_map`` plays no part. CheckpointError: not a drafter's."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in ARCHITECTURES:
        return name
    for mark, relative in RELATIVES.items():
        if isinstance(name, str) and mark in name.lower():
            raise CheckpointError(
                f"{where}: {shown(name)} is {relative}, which is not supported yet",
                f"use a drafter of architecture {' or '.join(ARCHITECTURES)}",
            )
    what = f"architecture {shown(name)}" if name is not None else "no architecture"
    raise CheckpointError(
        f"{where}: {what} is not a drafter's; supported: {', '.join(ARCHITECTURES)}",
        "give the DFlash drafter of this target, not the target or another model",
    )


def _refuse_variants(fields: Fields, not_supported: Mapping[str, object]) -> None:
    for key, neutral in not_supported.items():
        value = fields.values.get(key)
        if value is not None and value != neutral:
            raise CheckpointError(f"{fields.where}: {key} {shown(value)} is not supported yet")
    activation = fields.values.get("hidden_act")
    if activation not in (None, "silu"):
        raise CheckpointError(f"{fields.where}: hidden_act {shown(activation)} is not supported; drafters use silu")


def _quantization(top: Fields) -> Quantization | None:
    """Raises CheckpointError: a value is wrong, or the format is not read."""
    found = read_quantization(Fields(top.inner("quantization_config"), top.where))
    if found is not None and found.unread:
        raise CheckpointError(
            f"{top.where}: a drafter in the format {found.unread} is not supported",
            f"take the plain one, or one in {READ}",
        )
    return found


def _heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Query heads, key heads, head width, mutually consistent."""
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = fields.optional_integer("num_key_value_heads", 1, MAX_HEADS) or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = fields.optional_integer("head_dim", 2, MAX_HEADS)
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
                " and head_dim is not given"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise CheckpointError(f"{fields.where}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def _taps(fields: Fields) -> tuple[int, ...]:
    """The tapped layers: required, since a guess is wrong for 14 of 20 published drafters."""
    taps = fields.optional_list("target_layer_ids", MAX_TAPS)
    if taps is None:
        raise fields.missing("target_layer_ids")
    if not taps:
        raise CheckpointError(f"{fields.where}: target_layer_ids is empty; a drafter needs at least one tap")
    return tuple(fields.check_integer("target_layer_ids", tap, 0, text_config.MAX_LAYERS - 1) for tap in taps)


def _attention_pattern(
    fields: Fields, top: Fields, nested: Fields, layers: int
) -> tuple[tuple[str, ...], tuple[int | None, ...], tuple[bool, ...]]:
    """Layer types, windows and causality. Causality: top-level ``is_causal``, else ``dflash_config.causal``, else by
    type: a sliding layer is causal inside the block. ``use_swa`` without ``layer_types``: all sliding, none causal.
    With ``layer_types`` the window counts whatever ``use_sliding_window`` says: transformers' Qwen3Config drops it.
    """
    given = fields.optional_list("layer_types", MAX_LAYERS)
    windowed = given is None and bool(fields.optional_flag("use_swa"))
    types = _layer_types(fields, given, layers, windowed)
    explicit = top.optional_flag("is_causal")
    if explicit is None:
        explicit = nested.optional_flag("causal")
    if explicit is None and windowed:
        explicit = False
    sliding = [kind == SLIDING for kind in types]
    width = fields.integer("sliding_window", 1, MAX_WINDOW) if any(sliding) else None
    causal = tuple(slides if explicit is None else explicit for slides in sliding)
    return types, tuple(width if slides else None for slides in sliding), causal


def _layer_types(fields: Fields, given: list[Any] | None, layers: int, windowed: bool) -> tuple[str, ...]:
    if given is None:
        # As for Qwen3Config, the layers from max_window_layers on slide.
        first = fields.optional_integer("max_window_layers", 0, MAX_WINDOW)
        first = FIRST_SLIDING if first is None else first
        if windowed or not (fields.optional_flag("use_sliding_window") and fields.present("sliding_window")):
            first = 0 if windowed else layers
        return tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    if len(given) != layers:
        raise CheckpointError(f"{fields.where}: layer_types has {len(given)} entries for {layers} layers")
    for kind in given:
        if kind not in (FULL, SLIDING):
            raise CheckpointError(f"{fields.where}: layer type {shown(kind)} is not supported in a drafter")
    return tuple(given)
