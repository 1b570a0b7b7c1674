"""Predicts what the reference engine's allocations come to: caches, state, workspace, loading.

Every formula follows an allocation of `engine` or `models`; the tests hold the two together. Knows shapes and bytes,
nothing of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig, LatentAttentionConfig, Mixer, ModelConfig
from dflash_local.drafters.drafter import Drafter
from dflash_local.layout.cycle import PREFILL_CHUNK
from dflash_local.layout.linear import DEQUANTIZED_BYTES, DEQUANTIZED_SLICE
from dflash_local.planner.formats import DTYPE_BYTES, SMALL, head_bytes, largest_matrix, weight_bytes
from dflash_local.planner.ledger import Ledger, MemoryLine
from dflash_local.planner.load import Load
from dflash_local.planner.parameters import drafter_resident, target_parameters
from dflash_local.planner.workspace import PHASES, Conditions, Phase, largest_step

FIRST_ROWS = 256  # of both caches
FIRST_TABLE_ROWS = 512
MIB = 2**20
GPU_RESERVE = 704 * MIB  # CUDA context and kernels' code: 686 MiB on an H200
# Gaps between allocations: on a device cut to the predicted size a full reply of 32,768 tokens needed 2 % more.
GAPS = 0.03
LIBRARY_WORKSPACE = 32 * MIB  # cuBLAS, taken through torch's allocator


def ledger(target: ModelConfig, drafter: Drafter | None, load: Load) -> Ledger:
    """Sum the memory of a target, with or without its drafter, when ``load.context`` tokens are reached.

    The lines are those of the fuller moment: the last chunk of a prompt that fills the context, or the
    last block of a reply that does.
    """
    if target.quantization is not None and target.quantization.bitsandbytes:
        load = replace(load, bitsandbytes=target.quantization.bitsandbytes)
    weights = [
        MemoryLine("target weights", weight_bytes(target, load.dtype, load.bitsandbytes), _format(target, load)),
        _head(target, load),
    ]
    if drafter is not None:
        dtype = drafter_dtype(load.dtype)
        size = drafter_resident(drafter, target.hidden_size) * DTYPE_BYTES[dtype]
        stored = drafter.quantization
        weights.append(
            MemoryLine("drafter weights", size, dtype if stored is None else f"{stored.name} decoded to {dtype}")
        )
    loaded = loading(target, weights, load)
    moments = [Ledger((*weights, *_moment(target, drafter, load, phase)), loaded) for phase in PHASES]
    fullest = max(moments, key=lambda moment: moment.running or 0)
    lines = tuple(line for line in fullest.lines if line.bytes != 0)
    return Ledger(lines, loaded, reserve(load, fullest.peak))


def _head(target: ModelConfig, load: Load) -> MemoryLine:
    """Count the head: a tied one is the embedding's, unless a CPU multiplies, for which it is laid out once more."""
    counts = target_parameters(target)
    if not counts.head and load.device == "cpu" and load.dtype != "float16" and counts.total >= SMALL:
        return MemoryLine("head", counts.embedding * DTYPE_BYTES[load.dtype], "the embedding's, laid out for products")
    return MemoryLine("head", head_bytes(target, load.dtype), load.dtype if counts.head else "the embedding's")


def _format(target: ModelConfig, load: Load) -> str:
    """Return the target's weight format; only whole weights have been measured against the prediction."""
    if load.bitsandbytes is not None:
        return f"{load.bitsandbytes}, computed only"
    return load.dtype if target.quantization is None else f"{target.quantization.name} decoded to {load.dtype}"


def reserve(load: Load, peak: int | None, gaps: float = GAPS) -> MemoryLine:
    """Return what a GPU needs beside the tensors; other devices share the main memory, which has its own air."""
    if load.device != "cuda":
        return MemoryLine("reserve", 0)
    needed = None if peak is None else GPU_RESERVE + round(gaps * peak)
    return MemoryLine("reserve", needed, f"device context, {gaps:.0%} for gaps")


def _moment(target: ModelConfig, drafter: Drafter | None, load: Load, phase: Phase) -> list[MemoryLine]:
    """Return caches, state and workspace of a phase at its end."""
    rows, prompt = cache_rows(load.context), load.prefill_chunk or PREFILL_CHUNK
    lines = [MemoryLine("target KV", kv_bytes_per_token(target, load.dtype) * rows, f"{rows} rows")]
    grown = 0
    if drafter is not None:
        last = load.context if phase == "prefill" else load.context - 1 + load.block
        grown = context_rows(load.context, last, prompt)
        held = context_bytes_per_token(drafter, load.dtype) * grown + rope_table_bytes(drafter, load.dtype, last)
        lines.append(MemoryLine("drafter KV", held, f"{grown} rows, and the rope table"))
    if target.recurrent:
        state = state_bytes(target, load.dtype, held=True)
        lines.append(MemoryLine("recurrent state", state + _log(target, load), "with the log of a block"))
        copies = load.snapshots - (phase == "prefill")  # the newest is taken when the prompt is done
        lines.append(MemoryLine("state snapshots", state * copies, f"{copies} of them"))
    chunk = min(prompt, load.context) if phase == "prefill" else min(load.block, load.context)
    later = phase == "decode" or load.context > prompt
    conditions = Conditions(load.dtype, load.bitsandbytes, load.context, chunk, grown, later)
    size, note = largest_step(target, drafter, phase, conditions)
    lines.append(MemoryLine("workspace", size + library_workspace(load.device), note))
    return lines


def loading(target: ModelConfig, weights: Sequence[MemoryLine], load: Load) -> MemoryLine:
    """Return the fullest moment of loading: tensors go straight to their place, so it is what is loaded at its end."""
    whole = sum(line.bytes or 0 for line in weights)
    if load.bitsandbytes is not None:  # a matrix comes in 16 bits and is packed on the device
        return MemoryLine("loading", whole + 2 * largest_matrix(target), "the weights, and one before it is packed")
    if target.quantization is not None and target.quantization.at_load:
        return MemoryLine("loading", whole + quantizing_bytes(target), "the weights, and one while it is rounded")
    return MemoryLine("loading", whole, "the weights")


def quantizing_bytes(target: ModelConfig) -> int:
    """Return the largest matrix as it is stored, and a slice of it with what is worked out for it."""
    return largest_matrix(target) * DTYPE_BYTES.get(target.stored_dtype, 4) + DEQUANTIZED_SLICE * DEQUANTIZED_BYTES


def drafter_dtype(dtype: str) -> str:
    """Return the dtype of a drafter, which never runs in float16."""
    return "bfloat16" if dtype == "float16" else dtype


def library_workspace(device: str) -> int:
    """Return scratch that matrix libraries take through torch's allocator."""
    return LIBRARY_WORKSPACE if device == "cuda" else 0


def cache_rows(tokens: int) -> int:
    """Return rows of the target's cache, which grows by doubling."""
    rows = FIRST_ROWS
    while rows < tokens:
        rows *= 2
    return rows


def context_rows(tokens: int, last: int, chunk: int = PREFILL_CHUNK) -> int:
    """Count rows of the drafter's cache, which doubles, chunk by chunk of a prompt, then to ``last`` rows."""
    rows, done = FIRST_ROWS, 0
    while done < tokens:
        done = min(done + chunk, tokens)
        if done > rows:
            rows = max(2 * rows, done)
    return rows if last <= rows else max(2 * rows, last)


def rope_table_bytes(drafter: Drafter, dtype: str, last: int) -> int:
    """Return the drafter's cos and sin of every position so far, grown to powers of two."""
    rows = max(FIRST_TABLE_ROWS, 1 << (last - 1).bit_length())
    return drafter.rotation_size * rows * DTYPE_BYTES[drafter_dtype(dtype)]


def kv_bytes_per_token(target: ModelConfig, dtype: str = "bfloat16") -> int:
    """Return bytes of keys and values per token; of the latent and its rope part where attention keeps that (MLA)."""
    return sum(_kept(layer.mixer) * count for layer, count in target.layer_kinds.items()) * DTYPE_BYTES[dtype]


def _kept(mixer: Mixer) -> int:
    """Return numbers of a token that a layer keeps."""
    if isinstance(mixer, AttentionConfig):
        return 2 * mixer.kv_size
    if isinstance(mixer, LatentAttentionConfig):
        return mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return 0


def context_bytes_per_token(drafter: Drafter, dtype: str = "bfloat16") -> int:
    """Return bytes of the drafter's context keys and values per token."""
    return drafter.context_size * DTYPE_BYTES[drafter_dtype(dtype)]


def state_bytes(target: ModelConfig, dtype: str = "bfloat16", *, held: bool = False) -> int:
    """Return recurrent and convolution state of one sequence.

    Usual layouts keep as many convolution inputs as the kernel is wide; ``held``: ours keeps one less.
    """
    return sum(
        4 * part.value_size * part.key_head_dim + part.conv_dim * (part.conv_kernel_size - held) * DTYPE_BYTES[dtype]
        for part in _recurrent(target)
    )


def _recurrent(target: ModelConfig) -> list[GatedDeltaNetConfig]:
    return [layer.mixer for layer in target.layers if isinstance(layer.mixer, GatedDeltaNetConfig)]


def _log(target: ModelConfig, load: Load) -> int:
    """Return raw inputs of a block's rows, kept until it is known how many are accepted."""
    rows, size = max(load.block, 8), DTYPE_BYTES[load.dtype]
    return sum(
        4 * part.num_value_heads * rows * (part.key_head_dim + part.value_head_dim + 2)
        + part.conv_dim * (part.conv_kernel_size - 1 + rows) * size
        for part in _recurrent(target)
    )
