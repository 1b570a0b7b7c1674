"""Predicts what the fused engine's allocations come to: all of the planned context is reserved at load.

Every formula follows an allocation of `models.fused`, `kernels` or `engine`; the tests and
`benchmarks/fused_memory.py` hold the two together. Knows shapes and bytes, nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import ModelConfig
from dflash_local.planner import memory
from dflash_local.planner.fused_sizes import Sizes
from dflash_local.planner.fused_workspace import choice_bytes, prefill_steps, scratch_bytes
from dflash_local.planner.ledger import Ledger, Line
from dflash_local.planner.load import Load
from dflash_local.planner.parameters import drafter_resident, target_parameters
from dflash_local.planner.workspace import PHASES, Phase

PIECES, FEWEST = 64, 16  # of split attention: at most so many, of so many keys at least
LEAST, OCTAVE = 128, 32  # in exact mode: keys of the smallest pieces, pieces from a length to its double
CHOICE = 2048  # logits of one program that looks for the largest
RING, RECORD_HEAD, STOPS = 8, 4, 32
SMALL = 24  # bytes of single numbers that a cycle keeps on the device: limit, done, heat, seed, start and its kin


def ledger(target: ModelConfig, drafter: DrafterConfig | None, load: Load) -> Ledger:
    """The memory of a pair whose context is reserved; lines of the fuller of prefill and decode."""
    sizes = Sizes(target, drafter, load)
    held = _held(sizes)
    standing = Ledger(tuple(held), Line("loading", 0)).running
    made = _tables(sizes)
    whole = None if standing is None else standing + made
    loading = Line("loading", whole, "all that is reserved")
    moments = [Ledger((*held, *_moment(sizes, phase)), loading) for phase in PHASES]
    fullest = max(moments, key=lambda moment: moment.running or 0)
    lines = tuple(line for line in fullest.lines if line.bytes != 0)
    return Ledger(lines, loading, memory.reserve(load, fullest.peak))


def _held(sizes: Sizes) -> list[Line]:
    """What stands from load to close."""
    dtype, rows = sizes.load.dtype, sizes.rows

    def line(name: str, count: Callable[[Sizes], int], note: str) -> Line:
        return Line(name, count(sizes), note)

    return [
        line("target weights", _target_weights, dtype),
        line("head", _head, "the embedding's" if sizes.target.tie_word_embeddings else dtype),
        line("head for drafting", _narrow_head, "8 bits, beside the head"),
        line("drafter weights", _drafter_weights, "8 bits" if sizes.narrow_drafter else dtype),
        line("target KV", _target_kv, f"{sizes.capacity} rows"),
        line("drafter KV", _drafter_kv, f"{sizes.drafter_capacity} rows"),
        line("rotation tables", rotation_bytes, "of every position"),
        line("recurrent state", state_bytes, "with two blocks' tape"),
        line("attention pieces", pieces_bytes, "split over the keys"),
        line("buffers", buffer_bytes, f"of {rows} rows"),
    ]


def _moment(sizes: Sizes, phase: Phase) -> list[Line]:
    """What a phase needs beside."""
    load = sizes.load
    copies = load.snapshots - (phase == "prefill")  # the newest is taken when the prompt is done
    steps = prefill_steps(sizes) if phase == "prefill" else {"choice of tokens": choice_bytes(sizes)}
    note = max(steps, key=lambda name: steps[name])
    workspace = Line("workspace", steps[note], note)
    return [
        Line("state snapshots", snapshot_bytes(sizes) * copies, f"{copies} of them"),
        workspace,
        Line("graphs and libraries", scratch_bytes(sizes), "their scratch"),
    ]


def _target_weights(sizes: Sizes) -> int:
    counts = target_parameters(sizes.target)
    return (counts.total - counts.head) * sizes.size + _wide_vectors(sizes)


def _head(sizes: Sizes) -> int:
    return 0 if sizes.target.tie_word_embeddings else sizes.target.vocab_size * sizes.target.hidden_size * sizes.size


def _narrow_head(sizes: Sizes) -> int:
    if not sizes.narrow_head:
        return 0
    return sizes.target.vocab_size * (sizes.target.hidden_size + 4)


def _wide_vectors(sizes: Sizes) -> int:
    """What hybrids keep in float32 whatever the dtype: all norms that are counted from zero, decay rates and biases."""
    target = sizes.target
    if not sizes.gated:
        return 0
    recurrent = sizes.recurrent_layers
    wide = (2 * target.num_layers + 1) * target.hidden_size + (
        target.num_layers - recurrent
    ) * 2 * sizes.attention.head_dim
    if recurrent:
        wide += recurrent * 2 * sizes.linear.num_value_heads
    return wide * (4 - sizes.size)


def _drafter_weights(sizes: Sizes) -> int:
    """Eight bits: a byte for each weight of a matrix and a float32 for each of its columns."""
    drafter = sizes.drafter
    if drafter is None:
        return 0
    resident = drafter_resident(drafter, sizes.target.hidden_size)
    if not sizes.narrow_drafter:
        return resident * sizes.size
    layers, hidden, width = drafter.num_layers, drafter.hidden_size, drafter.head_dim
    keys, queries, inner = drafter.num_kv_heads * width, drafter.num_heads * width, drafter.intermediate_size
    shapes = [
        *[(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)] * layers,
        (hidden, sizes.taps * sizes.target.hidden_size),
        (2 * layers * keys, hidden),
    ]
    matrices = sum(columns * depth for columns, depth in shapes)
    return matrices + 4 * sum(columns for columns, _ in shapes) + (resident - matrices) * sizes.size


def _target_kv(sizes: Sizes) -> int:
    target = sizes.target
    each = 2 * sizes.attention.num_kv_heads * sizes.attention.head_dim * sizes.kv_size
    return (target.num_layers - sizes.recurrent_layers) * each * sizes.capacity


def _drafter_kv(sizes: Sizes) -> int:
    drafter = sizes.drafter
    if drafter is None:
        return 0
    width = drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
    return 2 * width * sizes.drafter_capacity * sizes.kv_size


def rotation_bytes(sizes: Sizes) -> int:
    """cos and sin of both models."""
    own = sizes.capacity * sizes.turned
    drafts = sizes.drafter_capacity * sizes.drafter.head_dim if sizes.drafter is not None else 0
    return 2 * (own + drafts) * sizes.size


def _tables(sizes: Sizes) -> int:
    """What making the larger table takes beside it: float32 angles, a cosine, its product."""
    wide = [sizes.capacity * sizes.turned]
    if sizes.drafter is not None:
        wide.append(sizes.drafter_capacity * sizes.drafter.head_dim)
    return 3 * 4 * max(wide)


def state_bytes(sizes: Sizes) -> int:
    """Committed state of every recurrent layer, and the tape of two blocks: one is read while one is written."""
    layers, rows = sizes.recurrent_layers, sizes.rows
    if not layers:
        return 0
    part = sizes.linear
    keys, values = part.num_key_heads * part.key_head_dim, part.num_value_heads * part.value_head_dim
    inputs = 2 * (part.conv_kernel_size - 1 + rows) * part.conv_dim * sizes.size
    wide = values * part.key_head_dim + 2 * rows * (keys + values + 2 * part.num_value_heads) + rows * (keys + values)
    return layers * (inputs + 4 * wide)


def snapshot_bytes(sizes: Sizes) -> int:
    """A copy of the state and of both halves of the convolution's window."""
    layers = sizes.recurrent_layers
    if not layers:
        return 0
    part = sizes.linear
    window = 2 * (part.conv_kernel_size - 1) * part.conv_dim * sizes.size
    return layers * (4 * part.num_value_heads * part.value_head_dim * part.key_head_dim + window)


def pieces_bytes(sizes: Sizes) -> int:
    """Partial results of split attention, float32: one room serves all layers of a model."""
    own = sizes.attention.num_heads * (sizes.attention.head_dim + 2) * sizes.rows
    own *= fixed_pieces(sizes.capacity) if sizes.load.exact else even_pieces(sizes.capacity)
    drafter = sizes.drafter
    if drafter is None:
        return 4 * own
    drafts = drafter.num_heads * (drafter.head_dim + 2) * sizes.load.block
    return 4 * (own + drafts * even_pieces(sizes.drafter_capacity))


def even_pieces(capacity: int) -> int:
    """Pieces that a cache is cut into at most."""
    return min(-(-capacity // FEWEST), PIECES)


def fixed_pieces(capacity: int) -> int:
    """The same in exact mode, where the cut follows from the position alone."""
    octave = max((max(capacity - 1, 0) // (OCTAVE * LEAST)).bit_length() - 1, 0)
    return octave * OCTAVE + -(-capacity // (LEAST << octave))


def buffer_bytes(sizes: Sizes) -> int:
    """A block's activations in both models, its logits, and what the choice and the acceptance keep."""
    target, rows, size = sizes.target, sizes.rows, sizes.size
    hidden, vocab = target.hidden_size, target.vocab_size
    columns = 3 * hidden + sizes.columns + 2 * sizes.queries + sizes.width + max(sizes.taps, 1) * hidden + vocab
    if sizes.recurrent_layers:
        part = sizes.linear
        columns += part.conv_dim + part.num_value_heads * (2 * part.value_head_dim + 2)
    choice = rows * -(-vocab // CHOICE) * 8
    record = 4 * (STOPS + RING * (RECORD_HEAD + rows)) + SMALL + 16 * rows
    return rows * columns * size + choice + record + (_drafter_buffers(sizes.drafter, sizes) if sizes.drafter else 0)


def _drafter_buffers(drafter: DrafterConfig, sizes: Sizes) -> int:
    block, size, hidden = sizes.load.block, sizes.size, drafter.hidden_size
    queries = drafter.num_heads * drafter.head_dim
    keys = drafter.num_kv_heads * drafter.head_dim
    columns = 3 * hidden + (queries + 2 * keys) + 2 * queries + drafter.intermediate_size
    many = max(block, sizes.rows) * (hidden + 2 * drafter.num_layers * keys)
    return (block * columns + many + (block - 1) * sizes.drafted) * size + 8 * block
