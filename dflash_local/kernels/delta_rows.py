"""What a long run of Gated-DeltaNet rows brings: convolution, norms and gates, all rows at once.

Queries, keys and values stay as the convolution rounds them, with their norms beside them as factors: a bfloat16
model's tensor cores can then multiply them without any further rounding. Knows nothing of chunks' products or states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_local.kernels.delta_step import DeltaShape, DeltaWeights
from dflash_local.kernels.gated_delta import CHUNK, NORM_EPS
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

ROWS = 16  # of one program; divides a chunk


@dataclass(frozen=True, slots=True)
class Rows:
    """A prompt's rows after convolution and SiLU, filled up with rows that change nothing to whole chunks.

    Attributes:
        mixed: [R, channels], as the convolution rounds them. scales: [R, 2 x key heads] float32: what brings a head's
            query to length key width ** -0.5 and its key to length one. gates: [R, 2, value heads] float32: log decay,
            beta.
    """

    mixed: torch.Tensor
    scales: torch.Tensor
    gates: torch.Tensor


def read_rows(projected: torch.Tensor, weights: DeltaWeights, window: torch.Tensor, shape: DeltaShape) -> Rows:
    """Convolution, norms and gates of a prompt's rows.

    Args:
        projected: [M, columns]: queries, keys, values before the convolution, z, b, a. window: [taps - 1, channels],
            the inputs before them.
    """
    if not runs_kernels(projected):
        return _read_rows_twin(projected, weights, window, shape)
    count = len(projected)
    room = math.ceil(count / CHUNK) * CHUNK
    scales = torch.empty(room, 2 * shape.keys, device=projected.device)
    gates = torch.empty(room, 2, shape.values, device=projected.device)
    rows = Rows(projected.new_empty(room, shape.channels), scales, gates)
    sizes = (odd(count), shape.keys, shape.values, shape.key_width, shape.value_width)
    wide = power_of_two(max(shape.key_width, shape.value_width))
    small = (weights.conv, weights.rate, weights.bias)
    _rows_kernel[(2 * shape.keys + shape.values + 1, room // ROWS)](
        projected, *small, window, rows.mixed, scales, gates, *sizes, wide, power_of_two(shape.values), shape.taps,
        NORM_EPS, ROWS, num_warps=4,
    )  # fmt: skip
    return rows


def odd(count: int) -> int:
    """A count as kernels take it here: Triton compiles anew for 1 and for multiples of 16, and this is neither."""
    return 2 * count + 1


def heads_of(rows: Rows, shape: DeltaShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys [R, value heads, key width] and values [R, value heads, value width], scaled, in float32."""
    keys, repeats, room = shape.keys * shape.key_width, shape.values // shape.keys, len(rows.mixed)
    q, k, v = rows.mixed.float().split((keys, keys, shape.values * shape.value_width), -1)
    scales = rows.scales.unsqueeze(-1).split(shape.keys, 1)
    q, k = (
        (part.reshape(room, shape.keys, -1) * scale).repeat_interleave(repeats, 1)
        for part, scale in zip((q, k), scales, strict=True)
    )
    return q, k, v.reshape(room, shape.values, -1)


def _read_rows_twin(projected: torch.Tensor, weights: DeltaWeights, window: torch.Tensor, shape: DeltaShape) -> Rows:
    count, taps = len(projected), shape.taps
    whole = torch.cat((window, projected[:, : shape.channels])).float()
    summed = torch.stack([whole[tap : tap + count] * weights.conv[:, tap].float() for tap in range(taps)]).sum(0)
    mixed = F.silu(summed.to(projected.dtype))
    heads = mixed[:, : 2 * shape.keys * shape.key_width].float().view(count, 2 * shape.keys, shape.key_width)
    scales = torch.rsqrt(heads.square().sum(-1) + NORM_EPS)
    scales[:, : shape.keys] *= shape.key_width**-0.5
    b, a = projected[:, -2 * shape.values :].split(shape.values, -1)
    g = weights.rate * F.softplus(a.float() + weights.bias)
    gates = torch.stack((g, b.sigmoid().float()), 1)
    more = -count % CHUNK
    return Rows(F.pad(mixed, (0, 0, 0, more)), F.pad(scales, (0, 0, 0, more)), F.pad(gates, (0, 0, 0, 0, 0, more)))


# fmt: off
@jit
def _rows_kernel(
    projected, conv, rate, bias, window, mixed, scales, gates, odd_rows, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, TAPS: tl.constexpr,
    EPS: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    head = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < odd_rows // 2
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_WIDTH + VALUES * VALUE_WIDTH
    COLUMNS: tl.constexpr = CHANNELS + VALUES * (VALUE_WIDTH + 2)
    if head == 2 * KEYS + VALUES:
        _gates_of(projected + row * COLUMNS + COLUMNS - 2 * VALUES, rate, bias, gates, row, here, VALUES, HEADS)
        return
    is_value = head >= 2 * KEYS
    at = tl.arange(0, WIDE)
    inside = at < tl.where(is_value, VALUE_WIDTH, KEY_WIDTH)
    channel = tl.where(is_value, 2 * KEYS * KEY_WIDTH + (head - 2 * KEYS) * VALUE_WIDTH, head * KEY_WIDTH) + at
    wanted = here[:, None] & inside[None, :]
    summed = tl.zeros((ROWS, WIDE), tl.float32)
    for tap in tl.static_range(TAPS):
        back = (row + (tap - TAPS + 1))[:, None]  # below zero it is in the window
        new = tl.load(projected + back * COLUMNS + channel[None, :], mask=wanted & (back >= 0), other=0.0)
        place = window + (back + (TAPS - 1)) * CHANNELS + channel[None, :]
        old = tl.load(place, mask=wanted & (back < 0), other=0.0)
        weight = tl.load(conv + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        summed += tl.where(back >= 0, new, old).to(tl.float32) * weight[None, :]
    kind = mixed.dtype.element_ty
    summed = summed.to(kind).to(tl.float32)
    active = (summed / (1.0 + tl.exp(-summed))).to(kind)
    tl.store(mixed + row[:, None] * CHANNELS + channel[None, :], active, mask=inside[None, :])
    if head < 2 * KEYS:
        wide = active.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + EPS)
        scale = tl.where(head < KEYS, scale / tl.sqrt(KEY_WIDTH * 1.0), scale)
        tl.store(scales + row * 2 * KEYS + head, tl.where(here, scale, 0.0))


@jit
def _gates_of(source, rate, bias, gates, row, here, VALUES: tl.constexpr, HEADS: tl.constexpr):
    """Log decay and beta of all heads; rows behind the prompt's decay nothing and write nothing."""
    at = tl.arange(0, HEADS)
    inside = at < VALUES
    wanted = here[:, None] & inside[None, :]
    b = tl.load(source[:, None] + at[None, :], mask=wanted, other=0.0)
    a = tl.load(source[:, None] + VALUES + at[None, :], mask=wanted, other=0.0).to(tl.float32)
    a += tl.load(bias + at, mask=inside, other=0.0)[None, :]
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    g = tl.load(rate + at, mask=inside, other=0.0)[None, :] * soft
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(source.dtype.element_ty).to(tl.float32)
    place = gates + row[:, None] * 2 * VALUES + at[None, :]
    tl.store(place, tl.where(wanted, g, 0.0), mask=inside[None, :])
    tl.store(place + VALUES, tl.where(wanted, beta, 0.0), mask=inside[None, :])
