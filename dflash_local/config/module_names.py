"""Names of modules that published checkpoints share."""

from __future__ import annotations

# Text model's prefix, most specific first: "model." would also match inside a wrapper's names.
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD = "lm_head"
HEAD_MODULES = (HEAD, f"language_model.{HEAD}")  # it does not lie below the text model's prefix
# Decay projections of Gated DeltaNet: small, and errors in them grow. Few quantisers take them.
ROUTERS = ("gate", "shared_expert_gate", "router")  # of a mixture, which every recipe leaves in 16 bits
DECAY = ("in_proj_a", "in_proj_b", "in_proj_ba")
GATED_DELTA_NET = "linear_attn"
INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")  # its input projections where their rows go by key heads (Qwen3-Next)
