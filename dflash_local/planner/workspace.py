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
    Mixer,
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
    """What the steps depend on beside the shapes.

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
        """A chunk on a fresh cache is causal by itself, and one row sees everything."""
        return self.rows > 1 and self.context > self.rows


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of the largest step and which one it is."""

    bytes: int
    note: str


def largest_step(target: ModelConfig, drafter: Drafter | None, phase: Phase, at: Conditions) -> Peak:
    """The step of a phase that needs most."""
    what = "a prompt chunk" if phase == "prefill" else "a block"
    beside = _beside(target, drafter, at)
    mixers = dict.fromkeys(layer.mixer for layer in target.layer_kinds)
    attentions = [mixer for mixer in mixers if not isinstance(mixer, GatedDeltaNetConfig)]
    recurrent = [mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetConfig)]
    masks = len({_window(mixer) for mixer in attentions}) + 1  # one of them in a copy of aligned width
    feeds = dict.fromkeys(layer.mlp for layer in target.layer_kinds)
    steps = {
        f"attention of {what}": beside + max((_attention(mixer, masks, at) for mixer in attentions), default=0),
        f"feed-forward of {what}": beside + max(_feed_forward(part, target.hidden_size, at) for part in feeds),
        f"mask of {what}": _mask_build(at),
    }
    if recurrent and phase == "prefill":
        steps[f"recurrent layer of {what}"] = beside + max(_recurrent(mixer, at) for mixer in recurrent)
    if drafter is not None:
        steps["growth of the drafter's cache"] = _growth(drafter, at) + (beside if phase == "prefill" else 0)
    if phase == "decode":
        steps["choice of tokens"] = _choice(target, at)
    note = max(steps, key=lambda name: steps[name])
    return Peak(steps[note], note)


def _beside(target: ModelConfig, drafter: Drafter | None, at: Conditions) -> int:
    """What lives through every layer: residual and its norm, the taps, and the pass before's output and taps."""
    row = target.hidden_size * at.size * at.rows
    taps = len(drafter.taps) if drafter is not None else 0
    return row * (2 + taps + (1 + taps if at.later else 0))


def _mask_build(at: Conditions) -> int:
    """Two boolean tensors and two of the model's dtype."""
    return at.rows * at.context * (2 + 2 * at.size) if at.masked else 0


def _window(mixer: Mixer) -> int | None:
    return mixer.sliding_window if isinstance(mixer, AttentionConfig) else None


def _attention(mixer: AttentionConfig | LatentAttentionConfig, masks: int, at: Conditions) -> int:
    """Queries, gate and output, the masks, and what the kernel lays out beside them."""
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
    """Gate, up and their product; for experts the rows sorted by expert as well."""
    width = part.intermediate_size
    if not isinstance(part, MLPConfig):
        return at.rows * (part.num_experts_per_tok or 1) * (3 * hidden + 5 * width) * at.size
    # nf4 weights are decoded one matrix at a time when there is more than one row.
    decoded = hidden * width * at.size if at.bitsandbytes in ("bnb-nf4", "bnb-fp4") and at.rows > 1 else 0
    return 3 * at.rows * width * at.size + decoded


def _recurrent(part: GatedDeltaNetConfig, at: Conditions) -> int:
    """Projections and window, then the convolution in float32 with its products laid out."""
    convolved = part.conv_dim * (2 * at.size + 4 + 4 * part.conv_kernel_size)
    return at.rows * (convolved + part.value_size * at.size)


def _growth(drafter: Drafter, at: Conditions) -> int:
    """Keys and values are copied one after the other: the old half of one of them stands beside the new."""
    return at.grown // 2 * (drafter.context_size // 2) * at.size


def _choice(target: ModelConfig, at: Conditions) -> int:
    """The logits, and their choice."""
    return at.rows * target.vocab_size * at.size + choice_bytes(target, at.rows)


def choice_bytes(target: ModelConfig, rows: int) -> int:
    """Sampling with every filter: noise; of some rows penalised and scaled logits, likelihoods, and a sort."""
    return target.vocab_size * (4 * rows + (3 * 4 + SORT) * min(rows, ROWS_TOGETHER))
