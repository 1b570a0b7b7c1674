"""Gated-DeltaNet for a prompt's rows: four launches, chunks of 64, committed at once; only the chunks' scan is
sequential.

Float32 factors go through bfloat16 tensor cores in pieces, so that nothing is rounded below float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels.delta_rows import DeltaRows, heads_of, odd, read_rows
from dflash_local.kernels.delta_step import GatedDeltaState, GatedDeltaWeights
from dflash_local.kernels.gated_delta import CHUNK
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

BLOCK = 16  # of the substitution: a chunk's triangle is four by four of them
MIN_DOT_DIM = 16  # head dim that a tensor core's product takes


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Describe how the chunks are computed.

    Attributes:
        block_v: value dimensions of one program of the scan, whose warps and stages these are too.
        precision: of products with float32 factors: ``ieee``, ``tf32x3``, or ``bf16x2`` and ``bf16x3``, which sum the
            products of two (17 bits) or three (24 bits) bfloat16 pieces of each float32 factor.
    """

    block_v: int = 32
    num_warps: int = 4
    num_stages: int = 2
    precision: str = "bf16x3"


CONFIGS = {torch.bfloat16: ChunkConfig(), torch.float32: ChunkConfig(block_v=16, num_stages=1)}


def chunk_config(rows: DeltaRows, shape: GatedDeltaNetConfig) -> ChunkConfig | None:
    """Return the rows' configuration; None where references compute them: on a CPU, and for heads of other sizes."""
    config, dims = CONFIGS.get(rows.mixed.dtype), (shape.key_head_dim, shape.value_head_dim)
    if not runs_kernels(rows.mixed) or config is None or any(d < MIN_DOT_DIM or d != power_of_two(d) for d in dims):
        return None
    return replace(config, block_v=min(config.block_v, shape.value_head_dim))


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """Hold what every chunk knows without the state before it, float32, by chunk and value head.

    Attributes:
        solved: [N, heads, 64, 64], (I + L)^-1 diag(beta). scores: [N, heads, 64, 64], of queries and keys, decayed.
        factors: [N, heads, 4, 64]: what each row's key and query count before the state that the chunk begins with,
            what its key counts in the state behind the chunk, and the decay from the chunk's begin to the row.
    """

    solved: torch.Tensor
    scores: torch.Tensor
    factors: torch.Tensor


def run_rows(
    projected: torch.Tensor, weights: GatedDeltaWeights, log: GatedDeltaState, shape: GatedDeltaNetConfig
) -> torch.Tensor:
    """Compute outputs [>= M, value heads, value head dim] float32 of committed rows; advance state and conv_states.

    Args:
        projected: [M, projection_size]: queries, keys, values before the convolution, z, b, a.
    """
    rows = read_rows(projected, weights, log.conv_state[0], shape)
    inputs = projected[1 - shape.conv_kernel_size :, : shape.conv_dim]
    log.conv_state.copy_(torch.cat((log.conv_state[0], inputs))[1 - shape.conv_kernel_size :])
    config = chunk_config(rows, shape)
    return scan_chunks(rows, prepare_chunks(rows, shape, config), log.state, shape, config)


def prepare_chunks(rows: DeltaRows, shape: GatedDeltaNetConfig, config: ChunkConfig | None) -> DeltaChunks:
    """Compute the part of every chunk that needs no state, all chunks at once."""
    if config is None:
        return _prepare_chunks_reference(rows, shape)
    count = len(rows.mixed) // CHUNK
    lower = rows.gates.new_empty(count, shape.num_value_heads, CHUNK, CHUNK)
    chunks = DeltaChunks(
        torch.empty_like(lower), torch.empty_like(lower), rows.gates.new_empty(count, shape.num_value_heads, 4, CHUNK)
    )
    _scores_kernel[(count, shape.num_key_heads)](
        rows.mixed, rows.scales, rows.gates, lower, chunks.scores, chunks.factors, shape.num_key_heads,
        shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, CHUNK, config.precision, num_warps=8,
    )  # fmt: skip
    _solve_kernel[(count, shape.num_value_heads)](
        lower, rows.gates, chunks.solved, shape.num_value_heads, CHUNK, BLOCK, num_warps=1
    )
    return chunks


def scan_chunks(
    rows: DeltaRows, chunks: DeltaChunks, state: torch.Tensor, shape: GatedDeltaNetConfig, config: ChunkConfig | None
) -> torch.Tensor:
    """Compute outputs [R, value heads, value head dim]; advance the state [value heads, value dim, key dim]."""
    if config is None:
        return _scan_chunks_reference(rows, chunks, state, shape)
    out = rows.gates.new_empty(len(rows.mixed), shape.num_value_heads, shape.value_head_dim)
    _scan_kernel[(shape.num_value_heads, shape.value_head_dim // config.block_v)](
        rows.mixed, chunks.solved, chunks.scores, chunks.factors, state, out, odd(len(chunks.scores)),
        shape.num_key_heads, shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, config.block_v, CHUNK,
        config.precision, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _prepare_chunks_reference(rows: DeltaRows, shape: GatedDeltaNetConfig) -> DeltaChunks:
    q, k, _ = (part.unflatten(0, (-1, CHUNK)).transpose(1, 2) for part in heads_of(rows, shape))  # [N, heads, 64, ..]
    g, beta = rows.gates.unflatten(0, (-1, CHUNK)).permute(2, 0, 3, 1)  # [N, heads, 64]
    total = g.cumsum(-1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    lower = (k @ k.transpose(-1, -2)) * decay * beta.unsqueeze(-1)
    # The solver takes the diagonal as ones, so only the part below it is read.
    solved = torch.linalg.solve_triangular(lower, torch.diag_embed(beta), upper=False, unitriangular=True)
    grown, left = total.exp(), (total[..., -1:] - total).exp()
    scales = rows.scales.repeat_interleave(shape.num_value_heads // shape.num_key_heads, 1)
    scales = scales.unflatten(0, (-1, CHUNK)).transpose(1, 2)
    of_query, of_key = scales.split(shape.num_value_heads, 1)
    factors = torch.stack((of_key * grown, of_query * grown, of_key * left, grown), 2)
    return DeltaChunks(solved.contiguous(), (q @ k.transpose(-1, -2)) * decay, factors)


def _scan_chunks_reference(
    rows: DeltaRows, chunks: DeltaChunks, state: torch.Tensor, shape: GatedDeltaNetConfig
) -> torch.Tensor:
    plain = DeltaRows(rows.mixed, torch.ones_like(rows.scales), rows.gates)
    q, k, v = (part.unflatten(0, (-1, CHUNK)).transpose(1, 2) for part in heads_of(plain, shape))
    running = state.transpose(1, 2)
    outputs = []
    for chunk in range(len(chunks.scores)):
        of_key, of_query, left, grown = chunks.factors[chunk].unsqueeze(-1).unbind(1)
        u = chunks.solved[chunk] @ (v[chunk] - of_key * (k[chunk] @ running))
        outputs.append(of_query * (q[chunk] @ running) + chunks.scores[chunk] @ u)
        running = running * grown[:, -1:] + k[chunk].transpose(-1, -2) @ (left * u)
    state.copy_(running.transpose(1, 2))
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1).contiguous()


@jit
def _product(a, b, PRECISION: tl.constexpr):
    """Return ``a @ b`` in float32; factors that are bfloat16 are taken as they are."""
    if PRECISION == "ieee" or PRECISION == "tf32x3":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    NARROW: tl.constexpr = tl.bfloat16
    if a.dtype == NARROW and b.dtype == NARROW:
        return tl.dot(a, b)
    a0 = a.to(NARROW)
    b0 = b.to(NARROW)
    # The smallest products first.
    total = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    if a.dtype != NARROW:
        a_rest = a - a0.to(tl.float32)
        a1 = a_rest.to(NARROW)
        if PRECISION == "bf16x3":
            total = tl.dot((a_rest - a1.to(tl.float32)).to(NARROW), b0, total)
    if b.dtype != NARROW:
        b_rest = b - b0.to(tl.float32)
        b1 = b_rest.to(NARROW)
        if PRECISION == "bf16x3":
            total = tl.dot(a0, (b_rest - b1.to(tl.float32)).to(NARROW), total)
    if a.dtype != NARROW and b.dtype != NARROW and PRECISION == "bf16x3":
        total = tl.dot(a1, b1, total)
    if a.dtype != NARROW:
        total = tl.dot(a1, b0, total)
    if b.dtype != NARROW:
        total = tl.dot(a0, b1, total)
    return tl.dot(a0, b0, total)


# fmt: off
@jit
def _scores_kernel(
    mixed, scales, gates, lower, scores, factors, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    # One program: one chunk of one key head. Its queries and keys [CHUNK, K_DIM] are read once, their two products
    # [CHUNK, CHUNK] stay in registers and are decayed for each value head that shares the key head.
    chunk = tl.program_id(0)
    key_head = tl.program_id(1)
    CONV_DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    REPEATS: tl.constexpr = V_HEADS // K_HEADS
    at = tl.arange(0, CHUNK)
    row = (chunk * CHUNK + at).to(tl.int64)
    wide = tl.arange(0, K_DIM)
    place = mixed + row[:, None] * CONV_DIM + key_head * K_DIM + wide[None, :]
    q = tl.load(place)
    k = tl.load(place + K_HEADS * K_DIM)
    of_query = tl.load(scales + row * 2 * K_HEADS + key_head)
    of_key = tl.load(scales + row * 2 * K_HEADS + K_HEADS + key_head)
    keys = _product(k, tl.trans(k), PRECISION) * of_key[:, None] * of_key[None, :]
    queries = _product(q, tl.trans(k), PRECISION) * of_query[:, None] * of_key[None, :]
    seen = at[:, None] >= at[None, :]
    for each in tl.static_range(REPEATS):
        head = key_head * REPEATS + each
        beta = tl.load(gates + (row * 2 + 1) * V_HEADS + head)
        total = tl.cumsum(tl.load(gates + row * 2 * V_HEADS + head), 0)
        last = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)
        # Masked before exp: above the diagonal the difference is positive and may overflow.
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        line = (chunk * V_HEADS + head).to(tl.int64)
        square = line * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
        tl.store(lower + square, tl.where(at[:, None] > at[None, :], keys * decay * beta[:, None], 0.0))
        tl.store(scores + square, tl.where(seen, queries * decay, 0.0))
        grown = tl.exp(total)
        factor = factors + line * 4 * CHUNK + at
        tl.store(factor, of_key * grown)
        tl.store(factor + CHUNK, of_query * grown)
        tl.store(factor + 2 * CHUNK, of_key * tl.exp(last - total))
        tl.store(factor + 3 * CHUNK, grown)


@jit
def _times(a, b):
    """Return a product of two tiles, as exact as float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def _solve_kernel(lower, gates, solved, V_HEADS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Solve (I + L)^-1 diag(beta) by forward substitution: row by row in the diagonal's tiles, then by tiles."""
    # One program: one chunk of one value head, all ten tiles [BLOCK, BLOCK] of its triangle in registers.
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    line = (chunk * V_HEADS + head).to(tl.int64) * CHUNK * CHUNK
    at = tl.arange(0, BLOCK)
    tile = tl.arange(0, CHUNK // BLOCK)
    diagonal = tl.zeros((CHUNK // BLOCK, BLOCK, BLOCK), tl.float32)
    diagonal += tl.where(at[:, None] == at[None, :], 1.0, 0.0)[None, :, :]
    corner = lower + line + tile[:, None] * BLOCK * (CHUNK + 1) + at[None, :]
    for row in range(1, BLOCK):
        weights = tl.load(corner + row * CHUNK)  # zero from the diagonal on
        found = tl.sum(weights[:, :, None] * diagonal, 1)
        diagonal = tl.where((at == row)[None, :, None], diagonal - found[:, None, :], diagonal)
    which = tile[:, None, None]
    d0 = tl.sum(tl.where(which == 0, diagonal, 0.0), 0)
    d1 = tl.sum(tl.where(which == 1, diagonal, 0.0), 0)
    d2 = tl.sum(tl.where(which == 2, diagonal, 0.0), 0)
    d3 = tl.sum(tl.where(which == 3, diagonal, 0.0), 0)
    square = line + at[:, None] * CHUNK + at[None, :]
    l10 = tl.load(lower + square + BLOCK * CHUNK)
    l20 = tl.load(lower + square + 2 * BLOCK * CHUNK)
    l21 = tl.load(lower + square + 2 * BLOCK * CHUNK + BLOCK)
    l30 = tl.load(lower + square + 3 * BLOCK * CHUNK)
    l31 = tl.load(lower + square + 3 * BLOCK * CHUNK + BLOCK)
    l32 = tl.load(lower + square + 3 * BLOCK * CHUNK + 2 * BLOCK)
    t10 = -_times(d1, _times(l10, d0))
    t21 = -_times(d2, _times(l21, d1))
    t32 = -_times(d3, _times(l32, d2))
    t20 = -_times(d2, _times(l20, d0) + _times(l21, t10))
    t31 = -_times(d3, _times(l31, d1) + _times(l32, t21))
    t30 = -_times(d3, _times(l30, d0) + _times(l31, t10) + _times(l32, t20))
    beta = gates + ((chunk * CHUNK + at).to(tl.int64) * 2 + 1) * V_HEADS + head
    b0 = tl.load(beta)[None, :]
    b1 = tl.load(beta + BLOCK * 2 * V_HEADS)[None, :]
    b2 = tl.load(beta + 2 * BLOCK * 2 * V_HEADS)[None, :]
    b3 = tl.load(beta + 3 * BLOCK * 2 * V_HEADS)[None, :]
    zero = tl.zeros((BLOCK, BLOCK), tl.float32)
    _row_of_tiles(solved + square, d0 * b0, zero, zero, zero, BLOCK)
    _row_of_tiles(solved + square + BLOCK * CHUNK, t10 * b0, d1 * b1, zero, zero, BLOCK)
    _row_of_tiles(solved + square + 2 * BLOCK * CHUNK, t20 * b0, t21 * b1, d2 * b2, zero, BLOCK)
    _row_of_tiles(solved + square + 3 * BLOCK * CHUNK, t30 * b0, t31 * b1, t32 * b2, d3 * b3, BLOCK)


@jit
def _row_of_tiles(place, first, second, third, fourth, BLOCK: tl.constexpr):
    tl.store(place, first)
    tl.store(place + BLOCK, second)
    tl.store(place + 2 * BLOCK, third)
    tl.store(place + 3 * BLOCK, fourth)


# fmt: off
@jit
def _scan_kernel(
    mixed, solved, scores, factors, state, out, odd_chunks, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK_V value dimensions of one value head, whose part of the state [K_DIM, BLOCK_V] stays in
    # registers over all chunks. The chunks are streamed: rows, the two triangles, factors; outputs are written.
    head = tl.program_id(0)
    v_at = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_at = tl.arange(0, K_DIM)
    at = tl.arange(0, CHUNK)
    CONV_DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    key_head = head // (V_HEADS // K_HEADS)
    home = state + (head * V_DIM + v_at)[None, :] * K_DIM + k_at[:, None]
    s = tl.load(home)
    of_query = at[:, None] * CONV_DIM + key_head * K_DIM + k_at[None, :]
    of_value = at[:, None] * CONV_DIM + 2 * K_HEADS * K_DIM + head * V_DIM + v_at[None, :]
    square = head * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
    line = head * 4 * CHUNK + at
    to = (at[:, None] * V_HEADS + head) * V_DIM + v_at[None, :]
    for _ in range(odd_chunks // 2):
        q = tl.load(mixed + of_query)
        k = tl.load(mixed + of_query + K_HEADS * K_DIM)
        v = tl.load(mixed + of_value).to(tl.float32)
        attended = tl.load(factors + line + CHUNK)[:, None] * _product(q, s, PRECISION)
        v -= tl.load(factors + line)[:, None] * _product(k, s, PRECISION)
        u = _product(tl.load(solved + square), v, PRECISION)
        attended += _product(tl.load(scores + square), u, PRECISION)
        tl.store(out + to, attended)
        shrink = tl.load(factors + head * 4 * CHUNK + 4 * CHUNK - 1)
        s = s * shrink + _product(tl.trans(k), tl.load(factors + line + 2 * CHUNK)[:, None] * u, PRECISION)
        mixed += CHUNK * CONV_DIM
        solved += V_HEADS * CHUNK * CHUNK
        scores += V_HEADS * CHUNK * CHUNK
        factors += V_HEADS * 4 * CHUNK
        out += CHUNK * V_HEADS * V_DIM
    tl.store(home, s)
