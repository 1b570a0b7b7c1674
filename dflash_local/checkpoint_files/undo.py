"""Say what a converter to GGUF did to a tensor, said as what a reader does to take it back. Data only, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SwapAxes:
    """Reorders the entries of one axis: those from ``start`` on, seen as [outer, first, second, inner], become
    [outer, second, first, inner]; entries before and behind stay.
    """

    axis: int
    start: int
    outer: int
    first: int
    second: int
    inner: int

    @property
    def size(self) -> int:
        """Count entries that it reorders."""
        return self.outer * self.first * self.second * self.inner


@dataclass(frozen=True, slots=True)
class Interleave:
    """Reorders all rows: they lie kind by kind, ``groups`` times as many as its width of each kind, and are wanted
    group by group.
    """

    groups: int
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Count its rows."""
        return self.groups * sum(self.widths)


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a number to every value: a norm that is stored plus one loses what its model adds itself."""

    number: float


@dataclass(frozen=True, slots=True)
class LogOfNegated:
    """Takes the logarithm of the negated values: Gated DeltaNet's ``A_log`` is stored as ``-exp(A_log)``."""


Undo = SwapAxes | Interleave | Add | LogOfNegated


def moves_columns(step: Undo) -> bool:
    """Return True where it reorders all columns of a matrix, and no rows."""
    return isinstance(step, SwapAxes) and step.axis == 1 and step.start == 0


def moves_rows_only(undo: tuple[Undo, ...]) -> bool:
    """Return True where rows of undecoded blocks can be taken back without decoding them."""
    return all(isinstance(step, Interleave) or (isinstance(step, SwapAxes) and step.axis == 0) for step in undo)


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
    """Return the changes of a tensor by its name in the file, without its layer's; ``config`` as of ``config_of``."""
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
