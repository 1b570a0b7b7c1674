"""What llama.cpp's converter did to each tensor's values, as what takes it back.

conversion/llama.py: rows of queries and keys, so that pairs that rotate together are neighbours. conversion/qwen.py:
norms plus one, ``A_log`` as ``-exp(A_log)``, and value heads of Gated DeltaNet in turns: a model keeps those of a key
head together, a file goes round the key heads. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.checkpoint_files.undo import Add, LogOfNegated, SwapAxes, Undo

PLUS_ONE_IN = ("qwen3next", "qwen35", "qwen35moe")
PLUS_ONE = (
    *("attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight"),
    "output_norm.weight",
)
TURNS_IN = ("qwen35", "qwen35moe")
BEHIND_KEYS = ("attn_qkv.weight", "ssm_conv1d.weight")  # rows of queries and keys come first
OF_HEADS = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a")  # one number, or row, a value head
COLUMNS = "ssm_out.weight"


def changes_of(name: str, architecture: str, config: Mapping[str, Any]) -> tuple[Undo, ...]:
    """Of a tensor by its name in the file, without its layer's; ``config`` as of ``config_of``, checked."""
    if architecture == "llama":
        return _pairs(name, config)
    if architecture not in PLUS_ONE_IN:
        return ()
    if name in PLUS_ONE:
        return (Add(-1.0),)
    steps: tuple[Undo, ...] = (LogOfNegated(),) if name == "ssm_a" else ()
    return steps + _turns(name, config) if architecture in TURNS_IN else steps


def _pairs(name: str, config: Mapping[str, Any]) -> tuple[Undo, ...]:
    stem = name.rpartition(".")[0]
    if stem not in ("attn_q", "attn_k"):
        return ()
    heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
    return (SwapAxes(0, 0, outer=heads, first=config["head_dim"] // 2, second=2, inner=1),)


def _turns(name: str, config: Mapping[str, Any]) -> tuple[Undo, ...]:
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    each = config["linear_num_value_heads"] // keys
    start = 2 * keys * config["linear_key_head_dim"] if name in BEHIND_KEYS else 0
    if each == 1 or name not in (*BEHIND_KEYS, *OF_HEADS, "attn_gate.weight", COLUMNS):
        return ()
    inner = 1 if name in OF_HEADS else width
    return (SwapAxes(int(name == COLUMNS), start, outer=1, first=each, second=keys, inner=inner),)
