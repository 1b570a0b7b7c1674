"""Add biases, norm query and key heads, rotate and write the KV cache, in one launch before attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.kernels.jit import (
    jit,
    overlapping,
    power_of_two,
    rows_of_program,
    runs_kernels,
    tl,
    wait_for_earlier_kernels,
)

Cache = tuple[torch.Tensor, ...]  # keys and values; of int8 codes also their scales, see ``cache_buffers``


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Describe how a fused QKV projection is laid out, and what is done to its heads.

    Attributes:
        rotary_dim: leading dimensions of a head that rotate.
        gated: each query head is followed by its gate (Qwen3.5), which is left where it is.
        norm_plus_one: the head norm rounds after its weight, which is given with the one added (Qwen3.5).
        per_head_norms: every KV head has a norm weight of its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool = False
    norm_plus_one: bool = False
    per_head_norms: bool = False

    @property
    def qkv_size(self) -> int:
        """Count rows of the fused projection's weight: queries with their gates, keys, values."""
        return (self.num_heads * (2 if self.gated else 1) + 2 * self.num_kv_heads) * self.head_dim


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    queries: torch.Tensor,
    cache: Cache,
    layout: HeadLayout,
    bias: torch.Tensor | None = None,
    rings: torch.Tensor | None = None,
) -> None:
    """Write the normed and rotated queries, and this block's keys and values at rows ``start ..`` of the cache.

    Args:
        qkv: [M, qkv_size]: queries, keys, values. norms: weights [head_dim] of query and key norm, or None;
            of the keys [KV heads, head_dim] with ``per_head_norms``.
        rotation: cos and sin [positions, rotary_dim], in the model's dtype.
        start: [1] int32 on the device, the first row's position. queries: [M, heads, head_dim], written.
        cache: keys and values [KV heads, rows, head_dim], written; a position's row is the rest of its division by the
            rows. Or [rows, head_dim] with ``rings``. Of the model's dtype; or int8 codes and behind them the scales
            [..., 1] float32 of each row's codes. A text then differs from the one that a cache of the model's dtype
            gives, and it differs alike in every decoding mode.
        bias: [qkv_size], added before all else; gates have it afterwards, the rest of ``qkv`` may or may not.
        rings: [KV heads, 2] int64: the first of a head's rows in the cache, and their number.
    """
    if not runs_kernels(qkv):
        return qk_norm_rope_cache_reference(qkv, norms, eps, rotation, start, queries, cache, layout, bias, rings)
    keys, values = cache[:2]
    weights, rows, block_d = norms or (qkv, qkv), qkv.shape[0], power_of_two(layout.head_dim)
    together, num_warps = rows_of_program(rows, block_d)
    _qk_norm_rope_cache_kernel[(-(-rows // together), layout.num_heads + 2 * layout.num_kv_heads)](
        qkv, qkv if bias is None else bias, *weights, eps, *rotation, start, queries, keys, values,
        *(cache[2:] or cache), start if rings is None else rings, keys.shape[1], rows, layout.num_heads,
        layout.num_kv_heads, layout.head_dim, block_d, layout.rotary_dim, layout.gated, norms is not None,
        layout.norm_plus_one, layout.per_head_norms, bias is not None, rings is not None, len(cache) > 2, together,
        num_warps=num_warps, **(overlapping(qkv) if together == 1 else {}),
    )  # fmt: skip


def qk_norm_rope_cache_reference(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    queries: torch.Tensor,
    cache: Cache,
    layout: HeadLayout,
    bias: torch.Tensor | None = None,
    rings: torch.Tensor | None = None,
) -> None:
    """Compute the same in plain PyTorch."""
    if bias is not None:
        qkv += bias
    rows, num_heads = qkv.shape[0], layout.num_heads
    head_dim, rotary_dim = layout.head_dim, layout.rotary_dim
    begin = int(start)
    cos, sin = (part[begin : begin + rows].unsqueeze(1) for part in rotation)

    def normed_and_rotated(given: torch.Tensor, norm: int) -> torch.Tensor:
        normed = _normed(given, norms[norm], eps, layout.norm_plus_one) if norms else given
        rotated, rest = normed[..., :rotary_dim], normed[..., rotary_dim:]
        low, high = rotated.chunk(2, -1)
        turned = rotated * cos + torch.cat((-high, low), -1) * sin
        return turned if rotary_dim == head_dim else torch.cat((turned, rest), -1)

    stride = head_dim * (2 if layout.gated else 1)
    if num_heads:
        given = qkv[:, : num_heads * stride].view(rows, num_heads, stride)[..., :head_dim]
        queries.copy_(normed_and_rotated(given, 0))
    k, v = qkv[:, num_heads * stride :].view(rows, 2, layout.num_kv_heads, head_dim).unbind(1)
    written = [given.transpose(0, 1) for given in (normed_and_rotated(k, 1), v)]
    if len(cache) > 2:
        codes, scales = zip(*map(coded, written), strict=True)
        written = [*codes, *scales]
    at = torch.arange(begin, begin + rows, device=qkv.device)
    places = at % cache[0].shape[1] if rings is None else (rings[:, :1] + at % rings[:, 1:]).flatten()
    for part, given in zip(cache, written, strict=True):
        if rings is None:
            part.index_copy_(1, places, given)
        else:
            part.index_copy_(0, places, given.reshape(-1, part.shape[-1]))


def coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes [..., head_dim] of rows, and the scale [..., 1] of each: that of a row with NaN is NaN."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) * (1 / 127)
    return (wide / scales).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8), scales


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, norm_plus_one: bool) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype) if norm_plus_one else scaled.to(x.dtype) * weight.to(x.dtype)


@jit
def _store_rows(cache, scales, at, x, dim, real, inside, head_dim: tl.constexpr, CODED: tl.constexpr):
    """Store a head's numbers as rows ``at`` of the cache: as they are, or as int8 codes of which 127 is the largest."""
    place = cache + (at * head_dim)[:, None] + dim[None, :]
    if CODED:
        wide = x.to(tl.float32)
        scale = tl.max(tl.abs(wide), 1) * (1 / 127)
        scale = tl.where(tl.sum((wide != wide).to(tl.int32), 1) > 0, float("nan"), scale)
        divisor = scale[:, None]
        code = tl.math.div_rn(wide, divisor)
        code = (code + 12582912.0) - 12582912.0  # rounds to the nearest, of two to the even one: 1.5 * 2 ** 23
        code = tl.where((divisor > 0.0) & (divisor < float("inf")), code, 0.0)
        tl.store(place, code.to(tl.int8), mask=inside)
        tl.store(scales + at, scale, mask=real)
    else:
        tl.store(place, x, mask=inside)


@jit
def _biased(x, bias, inside):
    """Return a product with its bias, rounded to its dtype."""
    return (x.to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)[None, :]).to(x.dtype)


@jit
def _ring_rows(rings, head, capacity, position, RINGS: tl.constexpr):
    """Return the rows of positions in the cache."""
    if RINGS:
        return tl.load(rings + 2 * head) + position % tl.load(rings + 2 * head + 1)
    else:  # not behind the return, for that would be compiled too
        return head * capacity + position % capacity


# fmt: off
@jit(do_not_specialize=("rows",))  # a prompt of another length would wait for the compiler
def _qk_norm_rope_cache_kernel(
    qkv, bias, query_norm, key_norm, eps, cos, sin, start, queries, keys, values, key_scales, value_scales, rings,
    capacity, rows,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, head_dim: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, NORM_PLUS_ONE: tl.constexpr,
    PER_HEAD_NORMS: tl.constexpr, BIASED: tl.constexpr, RINGS: tl.constexpr, CODED: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    # One program: one head of ROWS rows, all its dimensions in registers. A head of the queries is written to
    # ``queries``, one of the keys or values to its rows of the cache; values are neither normed nor rotated. The bias
    # of a query head's gate is added where the gate lies: no other program touches it.
    wait_for_earlier_kernels()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    PARTS: tl.constexpr = 2 if GATED else 1
    QKV_SIZE: tl.constexpr = (NUM_HEADS * PARTS + 2 * NUM_KV_HEADS) * head_dim
    dim = tl.arange(0, BLOCK_D)
    of_head = dim < head_dim
    real = (row < rows) | (ROWS == 1)
    inside = real[:, None] & of_head[None, :]
    position = (tl.load(start) + row).to(tl.int64)
    kind = queries.dtype.element_ty
    begin = tl.where(head < NUM_HEADS, head * PARTS, NUM_HEADS * PARTS + head - NUM_HEADS) * head_dim
    source = qkv + (row.to(tl.int64) * QKV_SIZE + begin)[:, None]
    value = tl.load(source + dim[None, :], mask=inside, other=0.0)
    added = bias + begin
    if BIASED:
        value = _biased(value, added + dim, of_head)
        if GATED:
            opens = of_head & (head < NUM_HEADS)
            gates, there = source + head_dim + dim[None, :], real[:, None] & opens[None, :]
            gate = _biased(tl.load(gates, mask=there, other=0.0), added + head_dim + dim, opens)
            tl.store(gates, gate, mask=there)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        at = _ring_rows(rings, head - NUM_HEADS - NUM_KV_HEADS, capacity, position, RINGS)
        _store_rows(values, value_scales, at, value, dim, real, inside, head_dim, CODED)
        return
    # Every rotating dimension needs its partner half a head away.
    HALF: tl.constexpr = ROTARY_DIM // 2
    rotates = dim < ROTARY_DIM
    partner = tl.where(dim < HALF, dim + HALF, tl.where(rotates, dim - HALF, dim))
    x = value.to(tl.float32)
    other = tl.load(source + partner[None, :], mask=inside, other=0.0)
    if BIASED:
        other = _biased(other, added + partner, of_head)
    other = other.to(tl.float32)
    if NORMED:
        length = tl.sqrt(tl.sum(x * x, 1) / head_dim + eps)[:, None]
        norm = query_norm if head < NUM_HEADS else key_norm
        if PER_HEAD_NORMS:
            norm += tl.where(head < NUM_HEADS, 0, head - NUM_HEADS) * head_dim
        mine = tl.load(norm + dim, mask=of_head, other=0.0).to(tl.float32)[None, :]
        its = tl.load(norm + partner, mask=of_head, other=0.0).to(tl.float32)[None, :]
        # Its partner takes the same norm, and is rounded alike: as one head does that is normed before it is rotated.
        x = x / length
        other = other / length
        if not NORM_PLUS_ONE:
            x = x.to(kind).to(tl.float32)
            other = other.to(kind).to(tl.float32)
        x = (x * mine).to(kind).to(tl.float32)
        other = (other * its).to(kind).to(tl.float32)
    angle = (position * ROTARY_DIM)[:, None] + dim[None, :]
    turned = real[:, None] & rotates[None, :]
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    other = tl.where((dim < HALF)[None, :], -other, other)
    x = ((x * c).to(kind).to(tl.float32) + (other * s).to(kind).to(tl.float32)).to(kind)
    if head < NUM_HEADS:
        place = (row * NUM_HEADS + head).to(tl.int64) * head_dim
        tl.store(queries + place[:, None] + dim[None, :], x, mask=inside)
    else:
        at = _ring_rows(rings, head - NUM_HEADS, capacity, position, RINGS)
        _store_rows(keys, key_scales, at, x, dim, real, inside, head_dim, CODED)
