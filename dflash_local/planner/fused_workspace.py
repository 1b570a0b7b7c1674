"""What the fused engine's largest steps hold for a moment: a prompt's chunk, a choice of tokens, scratch of libraries.

Each formula follows the tensors of `models.fused` and `kernels.delta_chunk` that are alive at once.
"""

from __future__ import annotations

from dflash_local.planner import memory
from dflash_local.planner.fused_sizes import Sizes
from dflash_local.planner.workspace import SORT

CHUNK = 64  # rows of a Gated-DeltaNet chunk


def prefill_steps(sizes: Sizes) -> dict[str, int]:
    """The steps of a prompt's chunk, each with what lives beside it."""
    target, size, drafter = sizes.target, sizes.size, sizes.drafter
    hidden, rows = target.hidden_size, min(memory.PREFILL_CHUNK, sizes.load.context)
    # The residual, its norm and the taps; and of the chunk before, its output and its taps.
    later = sizes.load.context > memory.PREFILL_CHUNK
    beside = hidden * (2 + sizes.taps + (1 + sizes.taps if later else 0))
    # The projection and the queries, the output, a gate and the gated output; and a float32 a row and head.
    attention = sizes.columns + (4 if sizes.gated else 2) * sizes.queries
    steps = {
        "attention of a prompt chunk": rows * ((beside + attention) * size + 4 * sizes.attention.num_heads),
        # The result is there before the two products; then silu of one of them.
        "feed-forward of a prompt chunk": rows * (beside + 4 * sizes.width) * size,
    }
    if sizes.recurrent_layers:
        steps["recurrent layer of a prompt chunk"] = rows * beside * size + _recurrent(sizes, rows)
    if drafter is not None:
        keys = drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
        kept = hidden * (1 + sizes.taps)
        steps["drafter's rows of a prompt chunk"] = rows * (kept + drafter.hidden_size + 2 * keys) * size
    return steps


def _recurrent(sizes: Sizes, rows: int) -> int:
    """The projection; the convolved rows with norms and gates; two of each chunk's three matrices, and the output."""
    part = sizes.linear
    values = part.num_value_heads * part.value_head_dim
    projected = part.conv_dim + values + 2 * part.num_value_heads
    rows = -(-rows // CHUNK) * CHUNK
    norms = 4 * 2 * (part.num_key_heads + part.num_value_heads)
    matrices = 4 * part.num_value_heads * (2 * CHUNK + 4) + 4 * max(values, part.num_value_heads * CHUNK)
    return rows * ((projected + part.conv_dim) * sizes.size + norms + matrices)


def choice_bytes(sizes: Sizes) -> int:
    """Sampling with every filter: noise, scaled scores and log-probabilities beside a sort."""
    return sizes.rows * sizes.target.vocab_size * (3 * 4 + SORT)


def scratch_bytes(sizes: Sizes) -> int:
    """Of the libraries, on the stream of the prompts and on the one that graphs are recorded on; and what products
    in a recorded block hold for a moment, at most both halves of a gated layer.
    """
    if sizes.load.device != "cuda":
        return 0
    products = sizes.rows * 3 * sizes.width * sizes.size
    return 2 * memory.library_workspace(sizes.load.device) + products
