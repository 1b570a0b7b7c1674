"""What a fused forward must know of a target, read from its text configuration. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_local.catalog.engine_rule import HYBRID, target_refusal
from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.checkpoint_files.text_config import INTEGERS, NUMBERS
from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.config.rope_parameters import RopeParameters
from dflash_local.errors import UsageError
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout
from dflash_local.models.target_facts import TargetFacts


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of a target.

    Attributes:
        qk_norm: queries and keys are normed head by head.
        norm_plus_one: norms count their weight from zero and round after it (Qwen3.5).
        layer_types: of each layer, ``attention`` or ``delta``. delta: of the Gated-DeltaNet layers, if there are any.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: HeadLayout
    qk_norm: bool
    eps: float
    rope: RopeParameters
    norm_plus_one: bool
    layer_types: tuple[str, ...]
    delta: GatedDeltaNetConfig | None

    @property
    def recurrent(self) -> bool:
        """True when a layer carries a state that cannot be cut back."""
        return self.delta is not None

    @classmethod
    def of(cls, facts: TargetFacts, where: str) -> TargetShape:
        """Read it.

        Raises:
            UsageError: the fused engine does not know this family, or this variant of it.
            CheckpointError: a value is missing or impossible.
        """
        if why := refusal(facts):
            raise UsageError(f"the fused engine cannot run {facts.model_type}: {why}", "use --engine reference")
        fields = Fields(facts.text_config, where)
        hybrid = facts.family == HYBRID
        num_heads = fields.integer("num_attention_heads", *INTEGERS["num_attention_heads"])
        num_kv_heads = fields.optional_integer("num_key_value_heads", *INTEGERS["num_key_value_heads"]) or num_heads
        head_dim = fields.optional_integer("head_dim", *INTEGERS["head_dim"]) or facts.hidden_size // num_heads
        rotary_dim = int(head_dim * _partial(facts.text_config)) if hybrid else head_dim
        types = facts.text_config.get("layer_types") or ["full_attention"] * facts.num_layers
        layer_types = tuple("delta" if kind == "linear_attention" else "attention" for kind in types)
        return cls(
            num_layers=facts.num_layers,
            hidden_size=facts.hidden_size,
            intermediate_size=fields.integer("intermediate_size", *INTEGERS["intermediate_size"]),
            heads=HeadLayout(num_heads, num_kv_heads, head_dim, rotary_dim, gated=hybrid, norm_plus_one=hybrid),
            qk_norm=facts.family != "llama",
            eps=fields.number("rms_norm_eps", *NUMBERS["rms_norm_eps"]),
            rope=RopeParameters.from_json(facts.text_config, where),
            norm_plus_one=hybrid,
            layer_types=layer_types,
            delta=_delta(fields) if "delta" in layer_types else None,
        )


def _partial(config: dict[str, Any]) -> float:
    """The share of a head that rotates."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(nested.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def _delta(fields: Fields) -> GatedDeltaNetConfig:
    def size(name: str) -> int:
        return fields.integer(name, *INTEGERS[name])

    return GatedDeltaNetConfig(
        num_key_heads=size("linear_num_key_heads"),
        num_value_heads=size("linear_num_value_heads"),
        key_head_dim=size("linear_key_head_dim"),
        value_head_dim=size("linear_value_head_dim"),
        conv_kernel_size=size("linear_conv_kernel_dim"),
    )


def refusal(facts: TargetFacts) -> str:
    """Why the fused engine cannot run a target; empty when it can."""
    return target_refusal(facts.family, facts.text_config, facts.quantization)
