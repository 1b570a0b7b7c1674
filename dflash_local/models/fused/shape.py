"""What a fused forward must know of a target, read from its text configuration. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.checkpoint_files.config_values import Fields
from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig
from dflash_local.config.fused_support import fused_refusal
from dflash_local.config.rope_parameters import RopeParameters
from dflash_local.errors import UsageError
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout
from dflash_local.models.target_facts import TargetFacts


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of a target whose layers of a kind are all alike.

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
        model = facts.model
        if why := fused_refusal(model):
            raise UsageError(f"the fused engine cannot run {facts.model_type}: {why}", "use --engine reference")
        attention = next(layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionConfig))
        delta = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, GatedDeltaNetConfig)), None)
        if model.rms_norm_eps is None:
            raise Fields({}, where).missing("rms_norm_eps")
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            intermediate_size=model.layers[0].mlp.intermediate_size,
            heads=HeadLayout(
                attention.num_heads,
                attention.num_kv_heads,
                attention.head_dim,
                attention.rotary_dim,
                gated=attention.gated,
                norm_plus_one=model.norm_plus_one,
            ),
            qk_norm=attention.qk_norm,
            eps=model.rms_norm_eps,
            rope=RopeParameters.from_json(facts.text_config, where) if model.rope is None else model.rope,
            norm_plus_one=model.norm_plus_one,
            layer_types=tuple(
                "delta" if isinstance(layer.mixer, GatedDeltaNetConfig) else "attention" for layer in model.layers
            ),
            delta=delta,
        )
