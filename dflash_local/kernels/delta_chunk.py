"""Gated-DeltaNet for a prompt's rows, as many as there are: four launches, chunks of 64, committed at once.

Only the walk over the chunks is sequential. Factors that are float32 go through bfloat16 tensor cores in pieces, so
that nothing is rounded below float32. Knows nothing of layers; a block with rollback is ``delta_step``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dflash_local.kernels.delta_rows import Rows, heads_of, odd, read_rows
from dflash_local.kernels.delta_step import DeltaShape, DeltaState, DeltaWeights
from dflash_local.kernels.gated_delta import CHUNK
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

TILE = 16  # of the substitution: a chunk's triangle is four by four of them
LEAST = 16  # width that a tensor core's product takes


@dataclass(frozen=True, slots=True)
class Way:
    """How the chunks are computed.

    Attributes:
        columns: value dimensions of one program of the walk; warps and stages are the walk's too.
        precision: of products with float32 factors: ``ieee``, ``tf32x3``, or ``bf16x2`` and ``bf16x3``, which sum the
            products of two (17 bits) or three (24 bits) bfloat16 pieces of each float32 factor.
    """

    columns: int = 32
    warps: int = 4
    stages: int = 2
    precision: str = "bf16x3"


WAYS = {torch.bfloat16: Way(), torch.float32: Way(columns=16, stages=1)}


def way_of(rows: Rows, shape: DeltaShape) -> Way | None:
    """The way that suits the rows, or None where the twins compute them: on a CPU, and where widths fit no product."""
    way, widths = WAYS.get(rows.mixed.dtype), (shape.key_width, shape.value_width)
    if not runs_kernels(rows.mixed) or way is None or any(w < LEAST or w != power_of_two(w) for w in widths):
        return None
    return replace(way, columns=min(way.columns, shape.value_width))


@dataclass(frozen=True, slots=True)
class Chunks:
    """What every chunk knows without the state before it, float32, by chunk and value head.

    Attributes:
        solved: [N, heads, 64, 64], (I + L)^-1 diag(beta). scores: [N, heads, 64, 64], of queries and keys, decayed.
        factors: [N, heads, 4, 64]: what each row's key and query count before the state that the chunk begins with,
            what its key counts in the state behind the chunk, and the decay from the chunk's begin to the row.
    """

    solved: torch.Tensor
    scores: torch.Tensor
    factors: torch.Tensor


def run_rows(projected: torch.Tensor, weights: DeltaWeights, tape: DeltaState, shape: DeltaShape) -> torch.Tensor:
    """Outputs [>= M, value heads, value width] float32 of committed rows; advances state and both halves of the window.

    Args:
        projected: [M, columns]: queries, keys, values before the convolution, z, b, a.
    """
    rows = read_rows(projected, weights, tape.window[0], shape)
    inputs = projected[1 - shape.taps :, : shape.channels]
    tape.window.copy_(torch.cat((tape.window[0], inputs))[1 - shape.taps :])
    way = way_of(rows, shape)
    return walk(rows, cut(rows, shape, way), tape.state, shape, way)


def cut(rows: Rows, shape: DeltaShape, way: Way | None) -> Chunks:
    """The part of every chunk that needs no state, all chunks at once."""
    if way is None:
        return _cut_twin(rows, shape)
    count = len(rows.mixed) // CHUNK
    lower = rows.gates.new_empty(count, shape.values, CHUNK, CHUNK)
    chunks = Chunks(
        torch.empty_like(lower), torch.empty_like(lower), rows.gates.new_empty(count, shape.values, 4, CHUNK)
    )
    sizes = (shape.keys, shape.values, shape.key_width, shape.value_width)
    _scores_kernel[(count, shape.keys)](
        rows.mixed, rows.scales, rows.gates, lower, chunks.scores, chunks.factors, *sizes, CHUNK, way.precision,
        num_warps=8,
    )  # fmt: skip
    _solve_kernel[(count, shape.values)](lower, rows.gates, chunks.solved, shape.values, CHUNK, TILE, num_warps=1)
    return chunks


def walk(rows: Rows, chunks: Chunks, state: torch.Tensor, shape: DeltaShape, way: Way | None) -> torch.Tensor:
    """Outputs [R, value heads, value width]; the state [value heads, value width, key width] moves behind the rows."""
    if way is None:
        return _walk_twin(rows, chunks, state, shape)
    out = rows.gates.new_empty(len(rows.mixed), shape.values, shape.value_width)
    sizes = (odd(len(chunks.scores)), shape.keys, shape.values, shape.key_width, shape.value_width)
    _walk_kernel[(shape.values, shape.value_width // way.columns)](
        rows.mixed, chunks.solved, chunks.scores, chunks.factors, state, out, *sizes, way.columns, CHUNK,
        way.precision, num_warps=way.warps, num_stages=way.stages,
    )  # fmt: skip
    return out


def _cut_twin(rows: Rows, shape: DeltaShape) -> Chunks:
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
    scales = rows.scales.repeat_interleave(shape.values // shape.keys, 1).unflatten(0, (-1, CHUNK)).transpose(1, 2)
    of_query, of_key = scales.split(shape.values, 1)
    factors = torch.stack((of_key * grown, of_query * grown, of_key * left, grown), 2)
    return Chunks(solved.contiguous(), (q @ k.transpose(-1, -2)) * decay, factors)


def _walk_twin(rows: Rows, chunks: Chunks, state: torch.Tensor, shape: DeltaShape) -> torch.Tensor:
    plain = Rows(rows.mixed, torch.ones_like(rows.scales), rows.gates)
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
    """``a @ b`` in float32; factors that are bfloat16 are taken as they are."""
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
    mixed, scales, gates, lower, scores, factors, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    chunk = tl.program_id(0)
    key_head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_WIDTH + VALUES * VALUE_WIDTH
    REPEATS: tl.constexpr = VALUES // KEYS
    at = tl.arange(0, CHUNK)
    row = (chunk * CHUNK + at).to(tl.int64)
    wide = tl.arange(0, KEY_WIDTH)
    place = mixed + row[:, None] * CHANNELS + key_head * KEY_WIDTH + wide[None, :]
    q = tl.load(place)
    k = tl.load(place + KEYS * KEY_WIDTH)
    of_query = tl.load(scales + row * 2 * KEYS + key_head)
    of_key = tl.load(scales + row * 2 * KEYS + KEYS + key_head)
    keys = _product(k, tl.trans(k), PRECISION) * of_key[:, None] * of_key[None, :]
    queries = _product(q, tl.trans(k), PRECISION) * of_query[:, None] * of_key[None, :]
    seen = at[:, None] >= at[None, :]
    for each in tl.static_range(REPEATS):
        head = key_head * REPEATS + each
        beta = tl.load(gates + (row * 2 + 1) * VALUES + head)
        total = tl.cumsum(tl.load(gates + row * 2 * VALUES + head), 0)
        last = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), 0)
        # Masked before exp: above the diagonal the difference is positive and may overflow.
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
        line = (chunk * VALUES + head).to(tl.int64)
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
    """A product of two tiles, as exact as float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def _solve_kernel(lower, gates, solved, VALUES: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """(I + L)^-1 diag(beta) by forward substitution: row by row inside the diagonal's tiles, then tile by tile."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    line = (chunk * VALUES + head).to(tl.int64) * CHUNK * CHUNK
    at = tl.arange(0, TILE)
    tile = tl.arange(0, CHUNK // TILE)
    diagonal = tl.zeros((CHUNK // TILE, TILE, TILE), tl.float32)
    diagonal += tl.where(at[:, None] == at[None, :], 1.0, 0.0)[None, :, :]
    corner = lower + line + tile[:, None] * TILE * (CHUNK + 1) + at[None, :]
    for row in range(1, TILE):
        weights = tl.load(corner + row * CHUNK)  # zero from the diagonal on
        found = tl.sum(weights[:, :, None] * diagonal, 1)
        diagonal = tl.where((at == row)[None, :, None], diagonal - found[:, None, :], diagonal)
    which = tile[:, None, None]
    d0 = tl.sum(tl.where(which == 0, diagonal, 0.0), 0)
    d1 = tl.sum(tl.where(which == 1, diagonal, 0.0), 0)
    d2 = tl.sum(tl.where(which == 2, diagonal, 0.0), 0)
    d3 = tl.sum(tl.where(which == 3, diagonal, 0.0), 0)
    square = line + at[:, None] * CHUNK + at[None, :]
    l10 = tl.load(lower + square + TILE * CHUNK)
    l20 = tl.load(lower + square + 2 * TILE * CHUNK)
    l21 = tl.load(lower + square + 2 * TILE * CHUNK + TILE)
    l30 = tl.load(lower + square + 3 * TILE * CHUNK)
    l31 = tl.load(lower + square + 3 * TILE * CHUNK + TILE)
    l32 = tl.load(lower + square + 3 * TILE * CHUNK + 2 * TILE)
    t10 = -_times(d1, _times(l10, d0))
    t21 = -_times(d2, _times(l21, d1))
    t32 = -_times(d3, _times(l32, d2))
    t20 = -_times(d2, _times(l20, d0) + _times(l21, t10))
    t31 = -_times(d3, _times(l31, d1) + _times(l32, t21))
    t30 = -_times(d3, _times(l30, d0) + _times(l31, t10) + _times(l32, t20))
    beta = gates + ((chunk * CHUNK + at).to(tl.int64) * 2 + 1) * VALUES + head
    b0 = tl.load(beta)[None, :]
    b1 = tl.load(beta + TILE * 2 * VALUES)[None, :]
    b2 = tl.load(beta + 2 * TILE * 2 * VALUES)[None, :]
    b3 = tl.load(beta + 3 * TILE * 2 * VALUES)[None, :]
    zero = tl.zeros((TILE, TILE), tl.float32)
    _row_of_tiles(solved + square, d0 * b0, zero, zero, zero, TILE)
    _row_of_tiles(solved + square + TILE * CHUNK, t10 * b0, d1 * b1, zero, zero, TILE)
    _row_of_tiles(solved + square + 2 * TILE * CHUNK, t20 * b0, t21 * b1, d2 * b2, zero, TILE)
    _row_of_tiles(solved + square + 3 * TILE * CHUNK, t30 * b0, t31 * b1, t32 * b2, d3 * b3, TILE)


@jit
def _row_of_tiles(place, first, second, third, fourth, TILE: tl.constexpr):
    tl.store(place, first)
    tl.store(place + TILE, second)
    tl.store(place + 2 * TILE, third)
    tl.store(place + 3 * TILE, fourth)


# fmt: off
@jit
def _walk_kernel(
    mixed, solved, scores, factors, state, out, odd_chunks, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    head = tl.program_id(0)
    v_at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k_at = tl.arange(0, KEY_WIDTH)
    at = tl.arange(0, CHUNK)
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_WIDTH + VALUES * VALUE_WIDTH
    key_head = head // (VALUES // KEYS)
    home = state + (head * VALUE_WIDTH + v_at)[None, :] * KEY_WIDTH + k_at[:, None]
    s = tl.load(home)
    of_query = at[:, None] * CHANNELS + key_head * KEY_WIDTH + k_at[None, :]
    of_value = at[:, None] * CHANNELS + 2 * KEYS * KEY_WIDTH + head * VALUE_WIDTH + v_at[None, :]
    square = head * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
    line = head * 4 * CHUNK + at
    to = (at[:, None] * VALUES + head) * VALUE_WIDTH + v_at[None, :]
    for _ in range(odd_chunks // 2):
        q = tl.load(mixed + of_query)
        k = tl.load(mixed + of_query + KEYS * KEY_WIDTH)
        v = tl.load(mixed + of_value).to(tl.float32)
        attended = tl.load(factors + line + CHUNK)[:, None] * _product(q, s, PRECISION)
        v -= tl.load(factors + line)[:, None] * _product(k, s, PRECISION)
        u = _product(tl.load(solved + square), v, PRECISION)
        attended += _product(tl.load(scores + square), u, PRECISION)
        tl.store(out + to, attended)
        shrink = tl.load(factors + head * 4 * CHUNK + 4 * CHUNK - 1)
        s = s * shrink + _product(tl.trans(k), tl.load(factors + line + 2 * CHUNK)[:, None] * u, PRECISION)
        mixed += CHUNK * CHANNELS
        solved += VALUES * CHUNK * CHUNK
        scores += VALUES * CHUNK * CHUNK
        factors += VALUES * 4 * CHUNK
        out += CHUNK * VALUES * VALUE_WIDTH
    tl.store(home, s)
