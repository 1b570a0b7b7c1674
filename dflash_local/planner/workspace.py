"""The largest temporary memory of the reference engine's steps: prefilling a chunk, verifying a block, choosing.

Counts the tensors that are alive together at the fullest line of each step, beside weights and caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_local.planner.formats import DTYPE_BYTES
from dflash_local.planner.parameters import Unknown, known
from dflash_local.planner.shape import FULL, GATED_ATTENTION, LINEAR, SLIDING, DrafterShape, TargetShape

EAGER_COPIES = 4  # of the scores, where attention is not fused (gpt-oss, whose sinks SDPA cannot take)
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
    quantize: str | None
    context: int
    rows: int
    grown: int
    later: bool

    @property
    def size(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def masked(self) -> bool:
        """A chunk on a fresh cache is causal by itself, and one row sees everything."""
        return self.rows > 1 and self.context > self.rows


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of the largest step and which one it is; None when the shape does not tell."""

    bytes: int | None
    note: str


def largest_step(target: TargetShape, drafter: DrafterShape | None, phase: Phase, at: Conditions) -> Peak:
    """The step of a phase that needs most."""
    try:
        what = "a prompt chunk" if phase == "prefill" else "a block"
        beside = _beside(target, drafter, at)
        steps = {
            f"attention of {what}": beside + _attention(target, at),
            f"feed-forward of {what}": beside + _feed_forward(target, at),
            f"mask of {what}": _mask_build(at),
        }
        if target.count(LINEAR) and phase == "prefill":
            steps[f"recurrent layer of {what}"] = beside + _recurrent(target, at)
        if drafter is not None:
            steps["growth of the drafter's cache"] = _growth(drafter, at) + (beside if phase == "prefill" else 0)
        if phase == "decode":
            steps["choice of tokens"] = _choice(target, at)
        note = max(steps, key=lambda name: steps[name])
        return Peak(steps[note], note)
    except Unknown:
        return Peak(None, "unknown")


def _beside(target: TargetShape, drafter: DrafterShape | None, at: Conditions) -> int:
    """What lives through every layer: residual and its norm, the taps, and the pass before's output and taps."""
    row = known(target.hidden) * at.size * at.rows
    taps = known(drafter.taps) if drafter is not None else 0
    return row * (2 + taps + (1 + taps if at.later else 0))


def _mask_build(at: Conditions) -> int:
    """Two boolean tensors and two of the model's dtype."""
    return at.rows * at.context * (2 + 2 * at.size) if at.masked else 0


def _attention(target: TargetShape, at: Conditions) -> int:
    """Queries, gate and output, the masks, and what the kernel lays out beside them."""
    head = _head_width(target)
    queries = known(target.heads) * head
    each = 3 if target.family in GATED_ATTENTION else 2
    own = at.rows * queries * (each * at.size + (4 if at.masked and head > FLOAT32_OUTPUT else 0))
    keys = at.context if at.masked else at.rows
    if target.family == "gpt_oss":
        own += EAGER_COPIES * known(target.heads) * at.rows * keys * at.size
    if not at.masked:
        return own
    masks = len({FULL, SLIDING} & set(target.kinds)) + 1  # one of them in a copy of aligned width
    return own + masks * at.rows * at.context * at.size + _repeated(target, at)


def _repeated(target: TargetShape, at: Conditions) -> int:
    """Keys and values of one layer, copied for every query head that shares them: masked SDPA wants that."""
    heads = known(target.heads)
    if target.latent is None and known(target.kv_heads) == heads:
        return 0
    return 2 * heads * _head_width(target) * at.context * at.size


def _head_width(target: TargetShape) -> int:
    return target.latent.nope + target.latent.rope if target.latent else known(target.head_dim)


def _feed_forward(target: TargetShape, at: Conditions) -> int:
    """Gate, up and their product; for experts the rows sorted by expert as well."""
    hidden, experts = known(target.hidden), target.experts
    if experts is not None:
        taken = at.rows * (experts.active or 1)
        return taken * (3 * hidden + 5 * experts.width) * at.size
    width = known(target.width)
    # nf4 weights are decoded one matrix at a time when there is more than one row.
    decoded = hidden * width * at.size if at.quantize == "nf4" and at.rows > 1 else 0
    return 3 * at.rows * width * at.size + decoded


def _recurrent(target: TargetShape, at: Conditions) -> int:
    """Projections and window, then the convolution in float32 with its products laid out."""
    part = target.linear
    if part is None:
        raise Unknown
    values = part.value_heads * part.value_dim
    return at.rows * (part.channels * (2 * at.size + 4 + 4 * part.kernel) + values * at.size)


def _growth(drafter: DrafterShape, at: Conditions) -> int:
    """Keys and values are copied one after the other: the old half of one of them stands beside the new."""
    width = known(drafter.layers) * known(drafter.kv_heads) * known(drafter.head_dim)
    return at.grown // 2 * width * at.size


def _choice(target: TargetShape, at: Conditions) -> int:
    """Sampling with every filter: logits, noise, scaled scores and log-probabilities beside a sort."""
    return at.rows * known(target.vocab) * (at.size + 3 * 4 + SORT)
