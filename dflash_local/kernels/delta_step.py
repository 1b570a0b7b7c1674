"""Gated-DeltaNet for a block of rows with exact rollback, as three launches a layer (ENGINE 3.6).

What a cycle read is kept raw (the tape). The next cycle first folds the rows that were kept into the committed
state, one by one, then runs its own rows in registers and stores nothing of them but their tape. So the state is
read once and written once a cycle, and changes only by committed rows. Which half of the tape is written follows
from the cycle's number, how many rows of the other half are folded from the device's count: the host decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_local.kernels.gated_delta import NORM_EPS
from dflash_local.kernels.jit import jit, power_of_two, runs_kernels, tl

VALUES = 4  # value dimensions of one program: the fastest of 4, 8, 16 and 32 on an H200


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """One layer: key heads, value heads, their widths, and the width of the convolution."""

    keys: int
    values: int
    key_width: int
    value_width: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.keys * self.key_width + self.values * self.value_width

    @property
    def columns(self) -> int:
        """Of the fused projection: the channels, then z, then b and a."""
        return self.channels + self.values * (self.value_width + 2)


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's committed state and its tape, float32 but for the convolution's inputs.

    Attributes:
        state: [value heads, value width, key width]. window: [2, taps - 1, channels], the last committed inputs; a
            block reads the half that it does not write.
        inputs: [2, rows, channels]. keys: [2, rows, key heads, key width]. values: [2, rows, value heads,
            value width]. gates: [2, rows, 2, value heads]: log decay, beta. queries: [rows, key heads, key width].
    """

    state: torch.Tensor
    window: torch.Tensor
    inputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gates: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Small tensors of one layer: convolution [channels, taps], rate and bias [value heads] float32."""

    conv: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the sequence is, on the device: cycles so far [1] and rows kept of the last one [1], int32."""

    serial: torch.Tensor
    kept: torch.Tensor


def read_inputs(
    projected: torch.Tensor, weights: DeltaWeights, state: DeltaState, shape: DeltaShape, turn: Turn
) -> None:
    """Convolution, head norms and gates of a block's rows onto the tape; commits the window's kept rows.

    Args:
        projected: [M, columns]: queries, keys, values before the convolution, z, b, a.
    """
    if not runs_kernels(projected):
        return _read_inputs_twin(projected, weights, state, shape, turn)
    rows = projected.shape[0]
    heads = 2 * shape.keys + shape.values
    sizes = (rows, state.inputs.shape[1], shape.keys, shape.values, shape.key_width, shape.value_width)
    wide, grid = power_of_two(max(shape.key_width, shape.value_width)), (heads + 1, rows)
    tape = (state.window, state.inputs, state.queries, state.keys, state.values, state.gates)
    small = (weights.conv, weights.rate, weights.bias)
    _inputs_kernel[grid](
        projected, *small, *tape, turn.serial, turn.kept, *sizes, wide, power_of_two(shape.values), shape.taps,
        NORM_EPS, num_warps=1,
    )  # fmt: skip


def run_block(rows: int, state: DeltaState, shape: DeltaShape, turn: Turn, out: torch.Tensor) -> None:
    """Fold what was kept of the last cycle, then the outputs [M, value heads, value width] of the rows on the tape."""
    if not runs_kernels(out):
        return _run_block_twin(rows, state, shape, turn, out)
    step = min(VALUES, shape.value_width)
    grid = (shape.values, shape.value_width // step)
    tape = (state.queries, state.keys, state.values, state.gates)
    sizes = (rows, state.keys.shape[1], shape.keys, shape.values, shape.key_width, shape.value_width)
    wide = power_of_two(shape.key_width)
    _block_kernel[grid](state.state, *tape, out, turn.serial, turn.kept, *sizes, wide, step, num_warps=1)


def gated_norm(
    out: torch.Tensor, projected: torch.Tensor, weight: torch.Tensor, eps: float, shape: DeltaShape, to: torch.Tensor
) -> None:
    """``to = norm(out) * silu(z)``, head by head.

    Args:
        out: [>= M, heads, width] float32. projected: [M, columns], of which z is a part. to: [M, heads x width].
    """
    rows = len(to)
    if not runs_kernels(out):
        z = projected[:, shape.channels : shape.channels + shape.values * shape.value_width].reshape(
            rows, -1, shape.value_width
        )
        wide = out[:rows].to(to.dtype).float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(to.dtype)
        to.copy_(((weight * normed) * F.silu(z.float())).to(to.dtype).reshape(rows, -1))
        return
    _gated_norm_kernel[(rows, shape.values)](
        out, projected, weight, to, eps, shape.columns, shape.channels, shape.values, shape.value_width,
        power_of_two(shape.value_width), num_warps=1,
    )  # fmt: skip


def settle(state: DeltaState, shape: DeltaShape, turn: Turn, rows: int) -> None:
    """Commit ``rows`` rows of the last cycle now, from the host: in every bit what ``run_block`` does at first."""
    half = (int(turn.serial) + 1) % 2
    state.window.copy_(torch.cat((state.window[half], state.inputs[half, :rows]))[-(shape.taps - 1) :].clone())
    if rows:
        run_block(0, state, shape, Turn(turn.serial, torch.full_like(turn.kept, rows)), state.state)


def _read_inputs_twin(
    projected: torch.Tensor, weights: DeltaWeights, state: DeltaState, shape: DeltaShape, turn: Turn
) -> None:
    rows, width = len(projected), shape.taps - 1
    half = int(turn.serial) % 2
    kept = int(turn.kept)
    state.window[half] = torch.cat((state.window[1 - half], state.inputs[1 - half, :kept]))[-width:]
    inputs = projected[:, : shape.channels]
    state.inputs[half, :rows] = inputs
    window = torch.cat((state.window[half], inputs)).float()  # [width + M, channels]
    summed = torch.stack([window[tap : tap + rows] * weights.conv[:, tap].float() for tap in range(shape.taps)]).sum(0)
    mixed = F.silu(summed.to(projected.dtype)).float()
    wide = shape.keys * shape.key_width
    q, k, v = mixed.split((wide, wide, shape.values * shape.value_width), -1)

    def normed(x: torch.Tensor) -> torch.Tensor:
        x = x.view(rows, shape.keys, shape.key_width)
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)

    state.queries[:rows] = normed(q) * shape.key_width**-0.5
    state.keys[half, :rows] = normed(k)
    state.values[half, :rows] = v.view(rows, shape.values, shape.value_width)
    b, a = projected[:, -2 * shape.values :].split(shape.values, -1)
    state.gates[half, :rows, 0] = weights.rate * F.softplus(a.float() + weights.bias)
    state.gates[half, :rows, 1] = b.sigmoid().float()


def _run_block_twin(rows: int, state: DeltaState, shape: DeltaShape, turn: Turn, out: torch.Tensor) -> None:
    half = int(turn.serial) % 2
    repeats = shape.values // shape.keys

    def advance(running: torch.Tensor, half: int, row: int) -> None:
        """Committed rows and others alike: a row's bits must not tell which it was."""
        (g, beta), key = state.gates[half, row], state.keys[half, row].repeat_interleave(repeats, 0).unsqueeze(1)
        running *= g.exp()[:, None, None]
        delta = beta.unsqueeze(-1) * (state.values[half, row] - (running * key).sum(-1))
        running += delta.unsqueeze(-1) * key

    for row in range(int(turn.kept)):
        advance(state.state, 1 - half, row)
    running = state.state.clone()
    for row in range(rows):
        advance(running, half, row)
        out[row] = (running * state.queries[row].repeat_interleave(repeats, 0).unsqueeze(1)).sum(-1)


# fmt: off
@jit
def _inputs_kernel(
    projected, conv, rate, bias, window, inputs, queries, keys, values, gates, serial, kept,
    rows, room, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WIDE: tl.constexpr, HEADS: tl.constexpr, TAPS: tl.constexpr, EPS: tl.constexpr,
):
    # fmt: on
    head = tl.program_id(0)
    row = tl.program_id(1)
    half = tl.load(serial) % 2
    CHANNELS: tl.constexpr = 2 * KEYS * KEY_WIDTH + VALUES * VALUE_WIDTH
    COLUMNS: tl.constexpr = CHANNELS + VALUES * (VALUE_WIDTH + 2)
    kind = projected.dtype.element_ty
    if head == 2 * KEYS + VALUES:
        _gates(projected + row * COLUMNS + COLUMNS - 2 * VALUES, rate, bias, gates, half * room + row, VALUES, HEADS)
        return
    is_value = head >= 2 * KEYS
    width = tl.where(is_value, VALUE_WIDTH, KEY_WIDTH)
    at = tl.arange(0, WIDE)
    inside = at < width
    channel = tl.where(is_value, 2 * KEYS * KEY_WIDTH + (head - 2 * KEYS) * VALUE_WIDTH, head * KEY_WIDTH) + at
    count = tl.load(kept)
    mixed = tl.zeros((WIDE,), tl.float32)
    for tap in tl.static_range(TAPS):
        back = row + tap - (TAPS - 1)  # of the block's rows; below zero it is a committed one
        here = tl.load(projected + back * COLUMNS + channel, mask=inside & (back >= 0), other=0.0)
        old = _committed(window, inputs, half, count, back, room, channel, inside & (back < 0), CHANNELS, TAPS)
        weight = tl.load(conv + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.where(back >= 0, here, old).to(tl.float32) * weight
        if tap == TAPS - 1:
            tl.store(inputs + (half * room + row) * CHANNELS + channel, here, mask=inside)
        elif row == 0:
            tl.store(window + (half * (TAPS - 1) + tap) * CHANNELS + channel, old, mask=inside)
    mixed = mixed.to(kind).to(tl.float32)
    mixed = (mixed / (1.0 + tl.exp(-mixed))).to(kind).to(tl.float32)
    if is_value:
        tl.store(values + ((half * room + row) * VALUES + head - 2 * KEYS) * VALUE_WIDTH + at, mixed, mask=inside)
        return
    mixed = mixed / tl.sqrt(tl.sum(tl.where(inside, mixed * mixed, 0.0), 0) + EPS)
    if head < KEYS:
        tl.store(queries + (row * KEYS + head) * KEY_WIDTH + at, mixed / tl.sqrt(KEY_WIDTH * 1.0), mask=inside)
    else:
        tl.store(keys + ((half * room + row) * KEYS + head - KEYS) * KEY_WIDTH + at, mixed, mask=inside)


# fmt: off
@jit
def _committed(
    window, inputs, half, count, back, room, channel, wanted, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):
    # fmt: on
    """The committed input ``-back`` before the block: of the last block's kept rows, or of the window before them."""
    tape = count + back
    from_tape = tl.load(
        inputs + ((1 - half) * room + tape) * CHANNELS + channel, mask=wanted & (tape >= 0), other=0.0
    )
    place = (1 - half) * (TAPS - 1) + TAPS - 1 + tape
    from_window = tl.load(window + place * CHANNELS + channel, mask=wanted & (tape < 0), other=0.0)
    return tl.where(tape >= 0, from_tape, from_window)


@jit
def _gates(source, rate, bias, gates, line, VALUES: tl.constexpr, HEADS: tl.constexpr):
    """Log decay and beta of all heads of one row."""
    at = tl.arange(0, HEADS)
    inside = at < VALUES
    b = tl.load(source + at, mask=inside, other=0.0)
    a = tl.load(source + VALUES + at, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(bias + at, mask=inside, other=0.0)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    place = gates + line * 2 * VALUES + at
    tl.store(place, tl.load(rate + at, mask=inside, other=0.0) * soft, mask=inside)
    beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    tl.store(place + VALUES, beta.to(source.dtype.element_ty).to(tl.float32), mask=inside)


# fmt: off
@jit
def _block_kernel(
    state, queries, keys, values, gates, out, serial, kept, rows, room,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr,
):
    # fmt: on
    head = tl.program_id(0)
    v_at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    k_at = tl.arange(0, WIDE)
    inside = k_at < KEY_WIDTH
    half = tl.load(serial) % 2
    count = tl.load(kept)
    place = state + (head * VALUE_WIDTH + v_at)[:, None] * KEY_WIDTH + k_at[None, :]
    s = tl.load(place, mask=inside[None, :], other=0.0)
    key_head = head // (VALUES // KEYS)
    old = (1 - half) * room
    for row in range(count):
        k = tl.load(keys + ((old + row) * KEYS + key_head) * KEY_WIDTH + k_at, mask=inside, other=0.0)
        v = tl.load(values + ((old + row) * VALUES + head) * VALUE_WIDTH + v_at)
        g = tl.load(gates + (old + row) * 2 * VALUES + head)
        beta = tl.load(gates + ((old + row) * 2 + 1) * VALUES + head)
        s = s * tl.exp(g)
        delta = beta * (v - tl.sum(s * k[None, :], 1))
        s = s + delta[:, None] * k[None, :]
    if count > 0:
        tl.store(place, s, mask=inside[None, :])
    new = half * room
    for row in range(rows):
        k = tl.load(keys + ((new + row) * KEYS + key_head) * KEY_WIDTH + k_at, mask=inside, other=0.0)
        v = tl.load(values + ((new + row) * VALUES + head) * VALUE_WIDTH + v_at)
        q = tl.load(queries + (row * KEYS + key_head) * KEY_WIDTH + k_at, mask=inside, other=0.0)
        g = tl.load(gates + (new + row) * 2 * VALUES + head)
        beta = tl.load(gates + ((new + row) * 2 + 1) * VALUES + head)
        s = s * tl.exp(g)
        delta = beta * (v - tl.sum(s * k[None, :], 1))
        s = s + delta[:, None] * k[None, :]
        tl.store(out + (row * VALUES + head) * VALUE_WIDTH + v_at, tl.sum(s * q[None, :], 1))


# fmt: off
@jit
def _gated_norm_kernel(
    out, projected, weight, to, eps, columns, channels, VALUES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, WIDE)
    inside = at < WIDTH
    kind = to.dtype.element_ty
    x = tl.load(out + (row * VALUES + head) * WIDTH + at, mask=inside, other=0.0).to(kind).to(tl.float32)
    scaled = (x / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)).to(kind).to(tl.float32)
    scaled = (scaled * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    z = tl.load(projected + row * columns + channels + head * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(to + (row * VALUES + head) * WIDTH + at, (scaled * (z / (1.0 + tl.exp(-z)))).to(kind), mask=inside)
