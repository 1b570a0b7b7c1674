"""Names of modules that published checkpoints share."""

from __future__ import annotations

import re

# Text model's prefix, most specific first: "model." would also match inside a wrapper's names.
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD = "lm_head"
HEAD_MODULES = (HEAD, f"language_model.{HEAD}")  # it does not lie below the text model's prefix
ROUTERS = ("gate", "shared_expert_gate", "router")  # of a mixture, which every recipe leaves in 16 bits
# Decay projections of Gated DeltaNet: small, and errors in them grow. Few quantisers take them.
DECAY = ("in_proj_a", "in_proj_b", "in_proj_ba")
GATED_DELTA_NET = "linear_attn"
INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")  # its input projections where their rows go by key heads (Qwen3-Next)
EXPERT = re.compile(r"(.*layers[.](\d+)[.].+[.]experts)[.](\d+)[.](gate|up|down)_proj")


def experts_of(module: str) -> str:
    """Return the mixture that a module is an expert's matrix of; empty for other modules."""
    found = EXPERT.fullmatch(module)
    return found[1] if found else ""


def together(module: str) -> str:
    """Return tensor that holds an expert's matrix where those of all experts are stored in one; empty for others."""
    experts = experts_of(module)
    return f"{experts}.{'down' if module.endswith('.down_proj') else 'gate_up'}_proj" if experts else ""
