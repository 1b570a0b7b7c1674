"""The largest temporary memory of the reference engine's steps: prefilling a chunk, verifying a block, choosing.

Counts the tensors that are alive together at the fullest line of each step, beside weights and caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_local.config.features import (
    AttentionConfig,
    FeedForward,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    MLPConfig,
    ModelConfig,
)
from dflash_local.drafters.drafter import Drafter
from dflash_local.layout.cycle import ROWS_TOGETHER
from dflash_local.planner.formats import DTYPE_BYTES

EAGER_COPIES = 4  # of the scores, where attention is not fused
FLOAT32_OUTPUT = 128  # heads wider than this are summed into a float32 buffer by masked SDPA
SORT = 44  # bytes per float32 that torch's sort takes on CUDA, results included: measured

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Holds what the steps depend on beside the shapes.

    Attributes:
        context: tokens held when the step is over. rows: most rows of one pass in this phase.
        grown: rows of the drafter's cache after the phase, 0 without a drafter.
        later: True when an earlier chunk's taps are still alive.
    """

    dtype: str
    bitsandbytes: str | None
    context: int
    rows: int
    grown: int
    later: bool

    @property
    def size(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def masked(self) -> bool:
        """Return False for a chunk on a fresh cache, causal by itself, and for one row, which sees everything."""
        return self.rows > 1 and self.context > self.rows


def largest_step(target: ModelConfig, drafter: Drafter | None, phase: Phase, at: Conditions) -> tuple[int, str]:
    """Return the bytes of the step of a phase that needs most, and which one that is."""
    what = "a prompt chunk" if phase == "prefill" else "a block"
    row, taps = target.hidden_size * at.size * at.rows, len(drafter.taps) if drafter is not None else 0
    # What lives through every layer: residual and its norm, the taps, and the pass before's output and taps.
    beside = row * (2 + taps + (1 + taps if at.later else 0))
    mixers = dict.fromkeys(layer.mixer for layer in target.layer_kinds)
    attentions = [mixer for mixer in mixers if not isinstance(mixer, GatedDeltaNetConfig)]
    windows = {mixer.sliding_window if isinstance(mixer, AttentionConfig) else None for mixer in attentions}
    masks = len(windows) + 1  # one of them in a copy of aligned width
    feeds = dict.fromkeys(layer.mlp for layer in target.layer_kinds)
    steps = {
        f"attention of {what}": beside + max((_attention(mixer, masks, at) for mixer in attentions), default=0),
        f"feed-forward of {what}": beside + max(_feed_forward(part, target.hidden_size, at) for part in feeds),
        # Two boolean tensors and two of the model's dtype.
        f"mask of {what}": at.rows * at.context * (2 + 2 * at.size) if at.masked else 0,
    }
    for mixer in mixers if phase == "prefill" else ():
        if isinstance(mixer, GatedDeltaNetConfig):  # projections and window, the convolution in float32, its products
            name = f"recurrent layer of {what}"
            convolved = mixer.conv_dim * (2 * at.size + 4 + 4 * mixer.conv_kernel_size)
            steps[name] = max(steps.get(name, 0), beside + at.rows * (convolved + mixer.value_size * at.size))
    if drafter is not None:  # keys and values one after the other: the old half of one stands beside the new
        grown = at.grown // 2 * (drafter.context_size // 2) * at.size
        steps["growth of the drafter's cache"] = grown + (beside if phase == "prefill" else 0)
    if phase == "decode":
        logits = at.rows * target.vocab_size * at.size
        steps["choice of tokens"] = logits + choice_bytes(target, at.rows)
    note = max(steps, key=lambda name: steps[name])
    return steps[note], note


def _attention(mixer: AttentionConfig | LatentAttentionConfig, masks: int, at: Conditions) -> int:
    """Count queries, gate and output, the masks, and what the kernel lays out beside them."""
    queries = mixer.num_heads * mixer.head_dim
    plain = mixer if isinstance(mixer, AttentionConfig) else None
    each = 3 if plain is not None and plain.gated else 2
    own = at.rows * queries * (each * at.size + (4 if at.masked and mixer.head_dim > FLOAT32_OUTPUT else 0))
    keys = at.context if at.masked else at.rows
    if plain is not None and not plain.fits_sdpa:
        own += EAGER_COPIES * mixer.num_heads * at.rows * keys * at.size
    if not at.masked:
        return own
    # Masked SDPA wants keys and values of one layer copied for every query head that shares them.
    shared = plain is None or plain.num_kv_heads != plain.num_heads
    repeated = 2 * queries * at.context * at.size if shared else 0
    return own + masks * at.rows * at.context * at.size + repeated


def _feed_forward(part: FeedForward, hidden: int, at: Conditions) -> int:
    """Count gate, up and their product; for experts the rows sorted by expert as well."""
    width = part.intermediate_size
    if not isinstance(part, MLPConfig):
        return at.rows * (part.num_experts_per_tok or 1) * (3 * hidden + 5 * width) * at.size
    # nf4 weights are decoded one matrix at a time when there is more than one row.
    decoded = hidden * width * at.size if at.bitsandbytes in ("bnb-nf4", "bnb-fp4") and at.rows > 1 else 0
    return 3 * at.rows * width * at.size + decoded


def choice_bytes(target: ModelConfig, rows: int) -> int:
    """Count sampling with every filter: noise; of some rows penalised and scaled logits, likelihoods, and a sort."""
    return target.vocab_size * (4 * rows + (3 * 4 + SORT) * min(rows, ROWS_TOGETHER))
