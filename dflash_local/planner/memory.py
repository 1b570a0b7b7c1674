"""Predicts what the reference engine's allocations come to: caches, state, workspace, loading.

Every formula follows an allocation of `engine` or `models`; the tests and `benchmarks/memory.py` hold
the two together. Knows shapes and bytes, nothing of devices.
"""

from __future__ import annotations

from dflash_local.planner.formats import DTYPE_BYTES, head_bytes, largest_matrix, weight_bytes
from dflash_local.planner.ledger import Ledger, Line
from dflash_local.planner.load import Load
from dflash_local.planner.parameters import Unknown, drafter_resident, known
from dflash_local.planner.shape import LINEAR, DrafterShape, TargetShape
from dflash_local.planner.workspace import PHASES, Conditions, Phase, largest_step

FIRST_ROWS = 256  # of both caches
FIRST_TABLE_ROWS = 512
PREFILL_CHUNK = 1024
MIB = 2**20
GPU_RESERVE = 704 * MIB  # CUDA context and kernels' code: 686 MiB on an H200
# Gaps between allocations: on a device cut to the predicted size a full reply of 32,768 tokens needed 2 % more.
GAPS = 0.03
LIBRARY_WORKSPACE = 32 * MIB  # cuBLAS, taken through torch's allocator


def ledger(target: TargetShape, drafter: DrafterShape | None, load: Load) -> Ledger:
    """The memory of a target, with or without its drafter, when ``load.context`` tokens are reached.

    The lines are those of the fuller moment: the last chunk of a prompt that fills the context, or the
    last block of a reply that does.
    """
    weights = [
        Line("target weights", weight_bytes(target, load.dtype, load.quantize), _format(load)),
        Line("head", head_bytes(target, load.dtype), "the embedding's" if target.tied else load.dtype),
    ]
    if drafter is not None:
        weights.append(Line("drafter weights", _drafter_weights(drafter, load), drafter_dtype(load.dtype)))
    moments = [
        Ledger((*weights, *_moment(target, drafter, load, phase)), loading(target, drafter, load)) for phase in PHASES
    ]
    fullest = max(moments, key=lambda moment: moment.running or 0)
    lines = tuple(line for line in fullest.lines if line.bytes != 0)
    return Ledger(lines, fullest.loading, reserve(load, fullest.peak))


def _format(load: Load) -> str:
    """The target's weight format; only whole weights have been measured against the prediction."""
    return load.dtype if load.quantize is None else f"{load.quantize}, computed only"


def reserve(load: Load, peak: int | None) -> Line:
    """What a GPU needs beside the tensors; other devices share the main memory, which has its own air."""
    if load.device != "cuda":
        return Line("reserve", 0)
    gaps = None if peak is None else round(GAPS * peak)
    return Line("reserve", _sum(GPU_RESERVE, gaps), f"device context, {GAPS:.0%} for gaps")


def _moment(target: TargetShape, drafter: DrafterShape | None, load: Load, phase: Phase) -> list[Line]:
    """Caches, state and workspace of a phase at its end."""
    rows = cache_rows(load.context)
    each = kv_bytes_per_token(target, load.dtype)
    lines = [Line("target KV", _product(each, rows), f"{rows} rows")]
    grown = 0
    if drafter is not None:
        last = load.context if phase == "prefill" else load.context - 1 + load.block
        grown = context_rows(load.context, last)
        held = _sum(
            _product(context_bytes_per_token(drafter, load.dtype), grown), rope_table_bytes(drafter, load.dtype, last)
        )
        lines.append(Line("drafter KV", held, f"{grown} rows, and the rope table"))
    if target.count(LINEAR):
        state = state_bytes(target, load.dtype, held=True)
        lines.append(Line("recurrent state", _sum(state, _tape(target, load)), "with the tape of a block"))
        copies = load.snapshots - (phase == "prefill")  # the newest is taken when the prompt is done
        lines.append(Line("state snapshots", _product(state, copies), f"{copies} of them"))
    chunk = min(PREFILL_CHUNK, load.context) if phase == "prefill" else min(load.block, load.context)
    later = phase == "decode" or load.context > PREFILL_CHUNK
    conditions = Conditions(load.dtype, load.quantize, load.context, chunk, grown, later)
    step = largest_step(target, drafter, phase, conditions)
    lines.append(Line("workspace", _sum(step.bytes, library_workspace(load.device)), step.note))
    return lines


def loading(target: TargetShape, drafter: DrafterShape | None, load: Load) -> Line:
    """The fullest moment of loading: tensors go straight to their place, so it is what is loaded at its end."""
    target_bytes = _sum(weight_bytes(target, load.dtype, load.quantize), head_bytes(target, load.dtype))
    whole = _sum(target_bytes, 0 if drafter is None else _drafter_weights(drafter, load))
    if load.quantize is None:
        return Line("loading", whole, "the weights")
    # A matrix comes in 16 bits and is packed on the device.
    return Line("loading", _sum(whole, _product(largest_matrix(target), 2)), "the weights, and one before it is packed")


def drafter_dtype(dtype: str) -> str:
    """A drafter never runs in float16."""
    return "bfloat16" if dtype == "float16" else dtype


def library_workspace(device: str) -> int:
    """Scratch that matrix libraries take through torch's allocator."""
    return LIBRARY_WORKSPACE if device == "cuda" else 0


def cache_rows(tokens: int) -> int:
    """Rows of the target's cache, which grows by doubling."""
    rows = FIRST_ROWS
    while rows < tokens:
        rows *= 2
    return rows


def context_rows(tokens: int, last: int) -> int:
    """Rows of the drafter's cache, which grows by doubling, chunk by chunk of a prompt, then to ``last`` rows."""
    rows, done = FIRST_ROWS, 0
    while done < tokens:
        done = min(done + PREFILL_CHUNK, tokens)
        if done > rows:
            rows = max(2 * rows, done)
    return rows if last <= rows else max(2 * rows, last)


def rope_table_bytes(drafter: DrafterShape, dtype: str, last: int) -> int | None:
    """The drafter's cos and sin of every position so far, grown to powers of two."""
    rows = max(FIRST_TABLE_ROWS, 1 << (last - 1).bit_length())
    return _product(drafter.head_dim, 2 * rows * DTYPE_BYTES[drafter_dtype(dtype)])


def kv_bytes_per_token(target: TargetShape, dtype: str = "bfloat16") -> int | None:
    """Bytes of keys and values per token; of the latent and its rope part where attention keeps that (MLA)."""
    layers, size = target.layers - target.count(LINEAR), DTYPE_BYTES[dtype]
    try:
        if target.latent is not None:
            return layers * (target.latent.kv_rank + target.latent.rope) * size
        return layers * 2 * known(target.kv_heads) * known(target.head_dim) * size
    except Unknown:
        return None


def context_bytes_per_token(drafter: DrafterShape, dtype: str = "bfloat16") -> int | None:
    """Bytes of the drafter's context keys and values per token; windows attend to less but keep all."""
    try:
        width = known(drafter.kv_heads) * known(drafter.head_dim)
        return known(drafter.layers) * 2 * width * DTYPE_BYTES[drafter_dtype(dtype)]
    except Unknown:
        return None


def state_bytes(target: TargetShape, dtype: str = "bfloat16", *, held: bool = False) -> int | None:
    """Recurrent and convolution state of one sequence.

    Usual layouts keep as many convolution inputs as the kernel is wide; ``held``: ours keeps one less.
    """
    layers, part = target.count(LINEAR), target.linear
    if part is None:
        return None if layers else 0
    state = part.value_heads * part.key_dim * part.value_dim * 4
    return layers * (state + part.channels * (part.kernel - held) * DTYPE_BYTES[dtype])


def _tape(target: TargetShape, load: Load) -> int | None:
    """Raw inputs of a block's rows, kept until it is known how many are accepted."""
    part, rows = target.linear, max(load.block, 8)
    if part is None:
        return None
    gates = part.value_heads * rows * (part.key_dim + part.value_dim + 2) * 4
    inputs = part.channels * (part.kernel - 1 + rows) * DTYPE_BYTES[load.dtype]
    return target.count(LINEAR) * (gates + inputs)


def _drafter_weights(drafter: DrafterShape, load: Load) -> int | None:
    return _product(drafter_resident(drafter), DTYPE_BYTES[drafter_dtype(load.dtype)])


def _product(value: int | None, times: int) -> int | None:
    return None if value is None else value * times


def _sum(*values: int | None) -> int | None:
    known_values = [value for value in values if value is not None]
    return sum(known_values) if len(known_values) == len(values) else None
