"""Between projection and attention: head norms, rotation, and keys and values into their cache rows, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl


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
        cache: keys and values [key heads, capacity, width], written.
    """
    if not runs_kernels(qkv):
        return place_heads_twin(qkv, norms, eps, rotation, start, queries, cache, heads)
    keys, values = cache
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
    cache[0].index_copy_(1, at, placed(k, 1).transpose(0, 1))
    cache[1].index_copy_(1, at, v.transpose(0, 1))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, late: bool) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype) if late else scaled.to(x.dtype) * weight.to(x.dtype)


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
        tl.store(values + ((head - Q - K) * capacity + position) * width + at, value, mask=inside)
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
        tl.store(keys + ((head - Q) * capacity + position) * width + at, x, mask=inside)
