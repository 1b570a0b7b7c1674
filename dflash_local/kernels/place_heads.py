"""Between projection and attention: head norms, rotation, and keys and values into their cache rows, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

LARGEST = 448.0  # of float8_e4m3fn: what is larger is cut off there, for the next code is NaN


@dataclass(frozen=True, slots=True)
class Heads:
    """How a fused projection's columns are laid out, and what is done to its heads.

    Attributes:
        queries, keys: numbers of heads. width: of a head. turned: leading dimensions that rotate.
        gated: each query head is followed by its gate (Qwen3.5), which is left where it is.
        late: the head norm rounds after its weight (Qwen3.5).
        own_norms: every key head has a norm weight of its own.
    """

    queries: int
    keys: int
    width: int
    turned: int
    gated: bool = False
    late: bool = False
    own_norms: bool = False

    @property
    def columns(self) -> int:
        """Of the fused projection."""
        return (self.queries * (2 if self.gated else 1) + 2 * self.keys) * self.width


def place_heads(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
) -> None:
    """Write the rotated queries, and this block's keys and values at rows ``start ..`` of the cache.

    Args:
        qkv: [M, columns]: queries, keys, values. norms: weights [width] of query and key norm, or None;
            of the keys [key heads, width] with ``own_norms``.
        rotation: cos and sin [positions, turned], in the model's dtype.
        start: [1] int32 on the device, the first row's position. queries: [M, query heads, width], written.
        cache: keys and values [key heads, capacity, width], written. Of the model's dtype, or float8_e4m3fn
            without a scale, each number the nearest: three bits of mantissa, so that a text differs from the one that
            a cache of the model's dtype gives, and it differs alike in every decoding mode.
    """
    if not runs_kernels(qkv):
        return place_heads_twin(qkv, norms, eps, rotation, start, queries, cache, heads)
    keys, values = (as_bytes(part) for part in cache)
    weights = norms or (qkv, qkv)
    sizes = (keys.shape[1], heads.queries, heads.keys, heads.width, power_of_two(heads.width), heads.turned)
    kind = (heads.gated, norms is not None, heads.late, heads.own_norms)
    grid = (qkv.shape[0], heads.queries + 2 * heads.keys)
    _place_heads_kernel[grid](qkv, *weights, eps, *rotation, start, queries, keys, values, *sizes, *kind, num_warps=1)


def place_heads_twin(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    start: torch.Tensor,
    queries: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
) -> None:
    """The same in plain PyTorch."""
    rows, width, turned = qkv.shape[0], heads.width, heads.turned
    at = start.long() + torch.arange(rows, device=qkv.device)
    cos, sin = (part[at].unsqueeze(1) for part in rotation)

    def placed(given: torch.Tensor, norm: int) -> torch.Tensor:
        normed = _normed(given, norms[norm], eps, heads.late) if norms else given
        head, rest = normed[..., :turned], normed[..., turned:]
        low, high = head.chunk(2, -1)
        return torch.cat((head * cos + torch.cat((-high, low), -1) * sin, rest), -1)

    step = width * (2 if heads.gated else 1)
    if heads.queries:
        queries.copy_(placed(qkv[:, : heads.queries * step].view(rows, heads.queries, step)[..., :width], 0))
    k, v = qkv[:, heads.queries * step :].view(rows, 2, heads.keys, width).unbind(1)
    for part, given in zip(cache, (placed(k, 1), v), strict=True):
        as_bytes(part).index_copy_(1, at, as_bytes(rounded(given.transpose(0, 1), part.dtype)))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers as a cache of that dtype holds them: float8_e4m3fn saturates; NaN stays NaN."""
    return (x.clamp(-LARGEST, LARGEST) if dtype == torch.float8_e4m3fn else x).to(dtype)


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """A cache as kernels take it that know no float8; others stay as they are."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, late: bool) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype) if late else scaled.to(x.dtype) * weight.to(x.dtype)


@jit
def _stored(x, kind: tl.constexpr):
    """A number as the cache holds it; bytes are e4m3 codes: the nearest, of two the even one."""
    if kind == tl.uint8:
        wide = x.to(tl.float32)
        bits = wide.to(tl.int32, bitcast=True)
        size = tl.abs(wide)
        size = tl.where(size > 448.0, 448.0, size)
        left = size.to(tl.int32, bitcast=True)
        code = ((left + 0x7FFFF + ((left >> 20) & 1)) >> 20) - (120 << 3)
        # Below the smallest normal number the codes are multiples of 2 ** -9: added to 2 ** 14 they round to those.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, code)
        code = tl.where(wide == wide, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:  # not behind the return, for that would be compiled too
        return x


# fmt: off
@jit
def _place_heads_kernel(
    qkv, query_norm, key_norm, eps, cos, sin, start, queries, keys, values, capacity, Q: tl.constexpr,
    K: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, GATED: tl.constexpr,
    NORMED: tl.constexpr, LATE: tl.constexpr, OWN: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    head = tl.program_id(1)
    step: tl.constexpr = 2 if GATED else 1
    columns: tl.constexpr = (Q * step + 2 * K) * width
    at = tl.arange(0, WIDTH)
    inside = at < width
    position = (tl.load(start) + row).to(tl.int64)
    kind = queries.dtype.element_ty
    begin = tl.where(head < Q, head * step, Q * step + head - Q) * width
    source = qkv + row.to(tl.int64) * columns + begin
    value = tl.load(source + at, mask=inside, other=0.0)
    if head >= Q + K:
        place = values + ((head - Q - K) * capacity + position) * width + at
        tl.store(place, _stored(value, values.dtype.element_ty), mask=inside)
        return
    # Every turning dimension needs its partner half a head away.
    half: tl.constexpr = TURNED // 2
    turning = at < TURNED
    partner = tl.where(at < half, at + half, tl.where(turning, at - half, at))
    x = value.to(tl.float32)
    other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        length = tl.sqrt(tl.sum(x * x, 0) / width + eps)
        norm = query_norm if head < Q else key_norm
        if OWN:
            norm += tl.where(head < Q, 0, head - Q) * width
        mine = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        its = tl.load(norm + partner, mask=inside, other=0.0).to(tl.float32)
        x = x / length
        other = other / length
        if not LATE:
            x = x.to(kind).to(tl.float32)
            other = other.to(kind).to(tl.float32)
        x = (x * mine).to(kind).to(tl.float32)
        other = (other * its).to(kind).to(tl.float32)
    angle = position * TURNED + at
    c = tl.load(cos + angle, mask=turning, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turning, other=0.0).to(tl.float32)
    other = tl.where(at < half, -other, other)
    x = ((x * c).to(kind).to(tl.float32) + (other * s).to(kind).to(tl.float32)).to(kind)
    if head < Q:
        tl.store(queries + (row * Q + head).to(tl.int64) * width + at, x, mask=inside)
    else:
        place = keys + ((head - Q) * capacity + position) * width + at
        tl.store(place, _stored(x, keys.dtype.element_ty), mask=inside)
