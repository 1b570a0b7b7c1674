"""What a fused forward must know of a target, read from its text configuration. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.errors import UsageError
from dflash_local.kernels.place_heads import Heads
from dflash_local.models.config_values import Fields
from dflash_local.models.drafter_config import MAX_WIDTH
from dflash_local.models.rope_parameters import RopeParameters
from dflash_local.models.target_facts import TargetFacts

FAMILIES = ("qwen3", "llama")


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of a target.

    Attributes:
        inner: width of the gated layer. head_norms: queries and keys are normed head by head.
    """

    layers: int
    hidden: int
    inner: int
    heads: Heads
    head_norms: bool
    eps: float
    rope: RopeParameters

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
        queries = fields.integer("num_attention_heads", 1, 4096)
        keys = fields.optional_integer("num_key_value_heads", 1, 4096) or queries
        width = fields.optional_integer("head_dim", 2, 4096) or facts.hidden_size // queries
        return cls(
            layers=facts.num_layers,
            hidden=facts.hidden_size,
            inner=fields.integer("intermediate_size", 1, 4 * MAX_WIDTH),
            heads=Heads(queries, keys, width, width),
            head_norms=facts.family == "qwen3",
            eps=fields.number("rms_norm_eps", 1e-12, 0.1),
            rope=RopeParameters.from_json(facts.text_config, where),
        )


def refusal(facts: TargetFacts) -> str:
    """Why the fused engine cannot run a target; empty when it can."""
    config = facts.text_config
    if facts.family not in FAMILIES:
        return f"it knows {', '.join(FAMILIES)}"
    if facts.quantization is not None:
        return f"its weights are in the format {facts.quantization}"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "its projections have biases"
    if config.get("hidden_act", "silu") != "silu":
        return f"its activation is {config['hidden_act']}"
    if set(config.get("layer_types") or ()) - {"full_attention"} or config.get("use_sliding_window"):
        return "it has sliding windows"
    return ""
