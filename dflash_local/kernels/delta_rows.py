"""Describe what a long run of Gated-DeltaNet rows brings: convolution, norms and gates, all rows at once.

Norms stand beside queries and keys as factors, so that tensor cores multiply bfloat16 without further rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels.delta_step import GatedDeltaWeights
from dflash_local.kernels.gated_delta import CHUNK, NORM_EPS
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

ROWS = 16  # of one program; divides a chunk


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """A prompt's rows after convolution and SiLU, filled up with rows that change nothing to whole chunks.

    Attributes:
        mixed: [R, conv_dim], as the convolution rounds them.
        scales: [R, 2 x key heads] float32: what brings a head's query to length key head dim ** -0.5 and its key to
            length one.
        gates: [R, 2, value heads] float32: log decay, beta.
    """

    mixed: torch.Tensor
    scales: torch.Tensor
    gates: torch.Tensor


def read_rows(
    projected: torch.Tensor, weights: GatedDeltaWeights, conv_state: torch.Tensor, shape: GatedDeltaNetConfig
) -> DeltaRows:
    """Read ``projected`` [M, projection_size]. ``conv_state``: [conv_kernel_size - 1, conv_dim], inputs before them."""
    if not runs_kernels(projected):
        return _read_rows_reference(projected, weights, conv_state, shape)
    count = len(projected)
    padded = math.ceil(count / CHUNK) * CHUNK
    scales = torch.empty(padded, 2 * shape.num_key_heads, device=projected.device)
    gates = torch.empty(padded, 2, shape.num_value_heads, device=projected.device)
    rows = DeltaRows(projected.new_empty(padded, shape.conv_dim), scales, gates)
    block_d = power_of_two(max(shape.key_head_dim, shape.value_head_dim))
    _rows_kernel[(2 * shape.num_key_heads + shape.num_value_heads + 1, padded // ROWS)](
        projected, weights.conv, weights.rate, weights.bias, conv_state, rows.mixed, scales, gates, odd(count),
        shape.num_key_heads, shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, block_d,
        power_of_two(shape.num_value_heads), shape.conv_kernel_size, NORM_EPS, ROWS, num_warps=4,
    )  # fmt: skip
    return rows


def odd(count: int) -> int:
    """Return a count as kernels take it: Triton compiles anew for 1 and for multiples of 16; this is neither."""
    return 2 * count + 1


def heads_of(rows: DeltaRows, shape: GatedDeltaNetConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys [R, value heads, key dim] and values [R, value heads, value dim], scaled, in float32."""
    key_size, padded = shape.num_key_heads * shape.key_head_dim, len(rows.mixed)
    repeats = shape.num_value_heads // shape.num_key_heads
    q, k, v = rows.mixed.float().split((key_size, key_size, shape.value_size), -1)
    scales = rows.scales.unsqueeze(-1).split(shape.num_key_heads, 1)
    q, k = (
        (part.reshape(padded, shape.num_key_heads, -1) * scale).repeat_interleave(repeats, 1)
        for part, scale in zip((q, k), scales, strict=True)
    )
    return q, k, v.reshape(padded, shape.num_value_heads, -1)


def _read_rows_reference(
    projected: torch.Tensor, weights: GatedDeltaWeights, conv_state: torch.Tensor, shape: GatedDeltaNetConfig
) -> DeltaRows:
    count, taps = len(projected), shape.conv_kernel_size
    whole = torch.cat((conv_state, projected[:, : shape.conv_dim])).float()
    summed = torch.stack([whole[tap : tap + count] * weights.conv[:, tap].float() for tap in range(taps)]).sum(0)
    mixed = F.silu(summed.to(projected.dtype))
    heads = mixed[:, : 2 * shape.num_key_heads * shape.key_head_dim].float()
    heads = heads.view(count, 2 * shape.num_key_heads, shape.key_head_dim)
    scales = torch.rsqrt(heads.square().sum(-1) + NORM_EPS)
    scales[:, : shape.num_key_heads] *= shape.key_head_dim**-0.5
    b, a = projected[:, -2 * shape.num_value_heads :].split(shape.num_value_heads, -1)
    g = weights.rate * F.softplus(a.float() + weights.bias)
    gates = torch.stack((g, b.sigmoid().float()), 1)
    more = -count % CHUNK
    return DeltaRows(F.pad(mixed, (0, 0, 0, more)), F.pad(scales, (0, 0, 0, more)), F.pad(gates, (0, 0, 0, 0, 0, more)))


# fmt: off
@jit
def _rows_kernel(
    projected, conv, rate, bias, conv_state, mixed, scales, gates, odd_rows, K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, CONV_KERNEL: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    # One program: ROWS rows of one head of the queries, keys or values [ROWS, BLOCK_D], or of the gates of all value
    # heads. The convolution's sums stay in registers; its inputs are read once for each tap.
    head = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < odd_rows // 2
    CONV_DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    PROJECTION_SIZE: tl.constexpr = CONV_DIM + V_HEADS * (V_DIM + 2)
    if head == 2 * K_HEADS + V_HEADS:
        source = projected + row * PROJECTION_SIZE + PROJECTION_SIZE - 2 * V_HEADS
        _gates_of(source, rate, bias, gates, row, here, V_HEADS, BLOCK_HEADS)
        return
    is_value = head >= 2 * K_HEADS
    at = tl.arange(0, BLOCK_D)
    inside = at < tl.where(is_value, V_DIM, K_DIM)
    channel = tl.where(is_value, 2 * K_HEADS * K_DIM + (head - 2 * K_HEADS) * V_DIM, head * K_DIM) + at
    wanted = here[:, None] & inside[None, :]
    summed = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for tap in tl.static_range(CONV_KERNEL):
        back = (row + (tap - CONV_KERNEL + 1))[:, None]  # below zero it is in the conv_state
        new = tl.load(projected + back * PROJECTION_SIZE + channel[None, :], mask=wanted & (back >= 0), other=0.0)
        place = conv_state + (back + (CONV_KERNEL - 1)) * CONV_DIM + channel[None, :]
        old = tl.load(place, mask=wanted & (back < 0), other=0.0)
        weight = tl.load(conv + channel * CONV_KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        summed += tl.where(back >= 0, new, old).to(tl.float32) * weight[None, :]
    kind = mixed.dtype.element_ty
    summed = summed.to(kind).to(tl.float32)
    active = (summed / (1.0 + tl.exp(-summed))).to(kind)
    tl.store(mixed + row[:, None] * CONV_DIM + channel[None, :], active, mask=inside[None, :])
    if head < 2 * K_HEADS:
        wide = active.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + EPS)
        scale = tl.where(head < K_HEADS, scale / tl.sqrt(K_DIM * 1.0), scale)
        tl.store(scales + row * 2 * K_HEADS + head, tl.where(here, scale, 0.0))


@jit
def _gates_of(source, rate, bias, gates, row, here, V_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Return log decay and beta of all heads; rows behind the prompt's decay nothing and write nothing."""
    at = tl.arange(0, BLOCK_HEADS)
    inside = at < V_HEADS
    wanted = here[:, None] & inside[None, :]
    b = tl.load(source[:, None] + at[None, :], mask=wanted, other=0.0)
    a = tl.load(source[:, None] + V_HEADS + at[None, :], mask=wanted, other=0.0).to(tl.float32)
    a += tl.load(bias + at, mask=inside, other=0.0)[None, :]
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))  # softplus, as torch cuts it off at 20
    g = tl.load(rate + at, mask=inside, other=0.0)[None, :] * soft
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(source.dtype.element_ty).to(tl.float32)
    place = gates + row[:, None] * 2 * V_HEADS + at[None, :]
    tl.store(place, tl.where(wanted, g, 0.0), mask=inside[None, :])
    tl.store(place + V_HEADS, tl.where(wanted, beta, 0.0), mask=inside[None, :])
