"""Gated-DeltaNet for a block of rows with exact rollback, as three launches a layer.

A cycle's inputs are logged raw. The next cycle first commits the rows that were kept to the state, one by one, then
runs its own in registers and stores only their log: the state is read and written once a cycle, and changes only by
committed rows. Which half of the log is written follows from the cycle's number, how many rows are committed from the
device's count: the host decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import cuda_driver, nvrtc
from dflash_local.kernels.cuda_driver import WARP_SIZE
from dflash_local.kernels.gated_delta import NORM_EPS
from dflash_local.kernels.jit import (
    jit,
    overlapping,
    power_of_two,
    rows_of_program,
    runs_kernels,
    start_next_kernel,
    tl,
    wait_for_earlier_kernels,
)

BLOCK_V = 4  # value dimensions of one program: the fastest of 4, 8, 16 and 32 on an H200
SOURCE = Path(__file__).with_name("delta_block.cu")
NATIVE_BLOCK_V, NATIVE_WARPS, NATIVE_KEYS = 16, 4, 32  # of its blocks; and what divides a key's dimensions
NATIVE_ROWS = 32  # in shared memory at a time
OVERLAPPING_ROWS = 8  # of more, programs of the inputs crowd behind the projection: 1 % of a cycle on an H200


@dataclass(frozen=True, slots=True)
class GatedDeltaState:
    """One layer's committed state and its recurrent log, float32 but for the convolution's inputs.

    Attributes:
        state: [value heads, value head dim, key head dim].
        conv_state: [2, conv_kernel_size - 1, conv_dim], the last committed inputs of the convolution; a block reads the
            half that it does not write.
        inputs: [2, rows, conv_dim]. keys: [2, rows, key heads, key head dim].
        values: [2, rows, value heads, value head dim]. gates: [2, rows, 2, value heads]: log decay, beta.
        queries: [rows, key heads, key head dim].
    """

    state: torch.Tensor
    conv_state: torch.Tensor
    inputs: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gates: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """Small tensors of one layer: convolution [conv_dim, conv_kernel_size], rate and bias [value heads] float32."""

    conv: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class CycleState:
    """Describe where the sequence is, on the device: cycles so far [1] and rows kept of the last one [1], int32."""

    cycle: torch.Tensor
    kept: torch.Tensor


def read_inputs(
    projected: torch.Tensor,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    shape: GatedDeltaNetConfig,
    cycle_state: CycleState,
) -> None:
    """Log convolution, head norms and gates of a block's rows; commit the kept rows to the conv_state.

    Args:
        projected: [M, projection_size]: queries, keys, values before the convolution, z, b, a.
    """
    if not runs_kernels(projected):
        return _read_inputs_reference(projected, weights, state, shape, cycle_state)
    rows = projected.shape[0]
    grid = (2 * shape.num_key_heads + shape.num_value_heads + 1, rows)
    block_d = power_of_two(max(shape.key_head_dim, shape.value_head_dim))
    _inputs_kernel[grid](
        projected, weights.conv, weights.rate, weights.bias, state.conv_state, state.inputs, state.queries, state.keys,
        state.values, state.gates, cycle_state.cycle, cycle_state.kept, rows, state.inputs.shape[1],
        shape.num_key_heads, shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, block_d,
        power_of_two(shape.num_value_heads), shape.conv_kernel_size, NORM_EPS, num_warps=1,
        **(overlapping(projected) if rows <= OVERLAPPING_ROWS else {}),
    )  # fmt: skip


def run_block(
    rows: int, state: GatedDeltaState, shape: GatedDeltaNetConfig, cycle_state: CycleState, out: torch.Tensor
) -> None:
    """Commit what was kept of the last cycle; then compute outputs [M, value heads, value dim] of the logged rows."""
    if not runs_kernels(out):
        return _run_block_reference(rows, state, shape, cycle_state, out)
    kernel = _native_kernel(out.device, shape) if out.is_cuda else None
    if kernel is not None:
        return _launch(kernel, rows, state, shape, cycle_state, out)
    block_v = min(BLOCK_V, shape.value_head_dim)
    _block_kernel[(shape.num_value_heads, shape.value_head_dim // block_v)](
        state.state, state.queries, state.keys, state.values, state.gates, out, cycle_state.cycle, cycle_state.kept,
        rows, state.keys.shape[1], shape.num_key_heads, shape.num_value_heads, shape.key_head_dim,
        shape.value_head_dim, power_of_two(shape.key_head_dim), block_v, num_warps=1,
    )  # fmt: skip


def compile_options(shape: GatedDeltaNetConfig) -> list[str]:
    """Return the compiler's command line for ``delta_block.cu``, but for the card."""
    sizes = {
        "K_HEADS": shape.num_key_heads,
        "V_HEADS": shape.num_value_heads,
        "K_DIM": shape.key_head_dim,
        "V_DIM": shape.value_head_dim,
        "V_OF_BLOCK": NATIVE_BLOCK_V,
        "WARPS": NATIVE_WARPS,
        "ROWS": NATIVE_ROWS,
        "STEP_K": NATIVE_KEYS,
        "SHARED_BYTES": shared_bytes(shape),
    }
    return ["--std=c++17", *(f"-D{name}={size}" for name, size in sizes.items())]


def shared_bytes(shape: GatedDeltaNetConfig) -> int:
    """Count bytes of rows in the shared memory of a block of ``delta_block.cu``: key, query, values, decay and beta."""
    return NATIVE_ROWS * (2 * shape.key_head_dim + NATIVE_BLOCK_V + 2) * 4


class _Launchable(Protocol):
    def launch(self, blocks: int, arguments: Sequence[torch.Tensor | int]) -> None: ...


def _launch(
    kernel: _Launchable,
    rows: int,
    state: GatedDeltaState,
    shape: GatedDeltaNetConfig,
    cycle_state: CycleState,
    out: torch.Tensor,
) -> None:
    blocks = shape.num_value_heads * shape.value_head_dim // NATIVE_BLOCK_V
    log = (state.state, state.queries, state.keys, state.values, state.gates)
    kernel.launch(blocks, (*log, out, cycle_state.cycle, cycle_state.kept, rows, state.keys.shape[1]))


@cache
def _native_kernel(device: torch.device, shape: GatedDeltaNetConfig) -> cuda_driver.LoadedKernel | None:
    """Load ``delta_block.cu`` for a layer; None where there is no compiler, for heads of other sizes, and where it
    gives other numbers than PyTorch: then Triton's kernel does the same.
    """
    capability = torch.cuda.get_device_capability(device)
    if shape.key_head_dim % NATIVE_KEYS or shape.value_head_dim % NATIVE_BLOCK_V or nvrtc.why_not(capability):
        return None
    source = SOURCE.read_text(encoding="utf-8")
    try:
        compiled = cuda_driver.cubin(source, compile_options(shape), device)
    except RuntimeError:
        return None
    kernel = cuda_driver.LoadedKernel(compiled, SOURCE.stem, NATIVE_WARPS * WARP_SIZE, shared_bytes(shape), device)
    return kernel if _is_right(kernel, shape, device) else None


def _is_right(kernel: _Launchable, shape: GatedDeltaNetConfig, device: torch.device) -> bool:
    """Return True where a kernel commits two rows and runs three more as the reference does, to rounding."""
    generator, rows, kept = torch.Generator().manual_seed(0), 3, 2

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5

    keys, values = (shape.num_key_heads, shape.key_head_dim), (shape.num_value_heads, shape.value_head_dim)
    gates = torch.rand(2, rows, 2, shape.num_value_heads, generator=generator)
    gates[:, :, 0].neg_()
    state = random(*values, shape.key_head_dim)
    tensors = (random(2, rows, *keys), random(2, rows, *values), gates, random(rows, *keys))
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place in (torch.device("cpu"), device):
        unused = torch.empty(0)
        log = GatedDeltaState(state.to(place, copy=True), unused, unused, *(each.to(place) for each in tensors))
        counts = CycleState(*torch.tensor([1, kept], dtype=torch.int32, device=place).split(1))
        out = torch.full((rows, *values), float("nan"), device=place)
        if not results:
            _run_block_reference(rows, log, shape, counts, out)
        else:
            _launch(kernel, rows, log, shape, counts, out)
        results.append((out.cpu(), log.state.cpu()))
    return all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(*results))


def gated_norm(
    out: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    shape: GatedDeltaNetConfig,
    to: torch.Tensor,
    turns: int = 1,
) -> None:
    """Compute ``to`` [M, value_size] = norm(out) * silu(z) by heads.

    Args:
        out: [>= M, value heads, value head dim] float32. turns: rounds of the key heads in which ``to`` has the heads:
            first the first value head of each, then the second; 1: all as they are.
    """
    rows = len(to)
    if not runs_kernels(out):
        z = projected[:, shape.conv_dim : shape.conv_dim + shape.value_size].reshape(rows, -1, shape.value_head_dim)
        wide = out[:rows].to(to.dtype).float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(to.dtype)
        gated = ((weight * normed) * F.silu(z.float())).to(to.dtype)
        to.copy_(gated.unflatten(1, (-1, turns)).transpose(1, 2).reshape(rows, -1))
        return
    block_d = power_of_two(shape.value_head_dim)
    together, num_warps = rows_of_program(rows, block_d)
    _gated_norm_kernel[(-(-rows // together), shape.num_value_heads)](
        out, projected, weight, to, eps, shape.projection_size, shape.conv_dim, rows, shape.num_value_heads,
        shape.value_head_dim, block_d, turns, together, num_warps=num_warps,
        **(overlapping(out) if together == 1 else {}),
    )  # fmt: skip


def commit(state: GatedDeltaState, shape: GatedDeltaNetConfig, cycle_state: CycleState, rows: int) -> None:
    """Commit ``rows`` rows of the last cycle now, from the host: in every bit what ``run_block`` does at first."""
    kept = torch.full_like(cycle_state.kept, rows)  # the kernel takes it without a wait, so the host waits behind it
    half = (int(cycle_state.cycle) + 1) % 2
    inputs = torch.cat((state.conv_state[half], state.inputs[half, :rows]))
    state.conv_state.copy_(inputs[-(shape.conv_kernel_size - 1) :].clone())
    if rows:
        run_block(0, state, shape, CycleState(cycle_state.cycle, kept), state.state)


def _read_inputs_reference(
    projected: torch.Tensor,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    shape: GatedDeltaNetConfig,
    cycle_state: CycleState,
) -> None:
    rows, before = len(projected), shape.conv_kernel_size - 1
    half = int(cycle_state.cycle) % 2
    kept = int(cycle_state.kept)
    state.conv_state[half] = torch.cat((state.conv_state[1 - half], state.inputs[1 - half, :kept]))[-before:]
    inputs = projected[:, : shape.conv_dim]
    state.inputs[half, :rows] = inputs
    joined = torch.cat((state.conv_state[half], inputs)).float()  # [conv_kernel_size - 1 + M, conv_dim]
    taps = [joined[tap : tap + rows] * weights.conv[:, tap].float() for tap in range(shape.conv_kernel_size)]
    summed = torch.stack(taps).sum(0)
    mixed = F.silu(summed.to(projected.dtype)).float()
    wide = shape.num_key_heads * shape.key_head_dim
    q, k, v = mixed.split((wide, wide, shape.value_size), -1)

    def normed(x: torch.Tensor) -> torch.Tensor:
        x = x.view(rows, shape.num_key_heads, shape.key_head_dim)
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)

    state.queries[:rows] = normed(q) * shape.key_head_dim**-0.5
    state.keys[half, :rows] = normed(k)
    state.values[half, :rows] = v.view(rows, shape.num_value_heads, shape.value_head_dim)
    b, a = projected[:, -2 * shape.num_value_heads :].split(shape.num_value_heads, -1)
    state.gates[half, :rows, 0] = weights.rate * F.softplus(a.float() + weights.bias)
    state.gates[half, :rows, 1] = b.sigmoid().float()


def _run_block_reference(
    rows: int, state: GatedDeltaState, shape: GatedDeltaNetConfig, cycle_state: CycleState, out: torch.Tensor
) -> None:
    half = int(cycle_state.cycle) % 2
    repeats = shape.num_value_heads // shape.num_key_heads

    def advance(running: torch.Tensor, half: int, row: int) -> None:
        """Advance by a row, committed or not: its bits must not tell which it was."""
        (g, beta), key = state.gates[half, row], state.keys[half, row].repeat_interleave(repeats, 0).unsqueeze(1)
        running *= g.exp()[:, None, None]
        delta = beta.unsqueeze(-1) * (state.values[half, row] - (running * key).sum(-1))
        running += delta.unsqueeze(-1) * key

    for row in range(int(cycle_state.kept)):
        advance(state.state, 1 - half, row)
    running = state.state.clone()
    for row in range(rows):
        advance(running, half, row)
        out[row] = (running * state.queries[row].repeat_interleave(repeats, 0).unsqueeze(1)).sum(-1)


# fmt: off
@jit
def _inputs_kernel(
    projected, conv, rate, bias, conv_state, inputs, queries, keys, values, gates, cycle, kept,
    rows, max_rows, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr, CONV_KERNEL: tl.constexpr, EPS: tl.constexpr,
):
    # fmt: on
    # One program: one row of one head of the queries, keys or values, all its channels [BLOCK_D] in registers; or, the
    # last program of a row, the gates of all value heads. Of the convolution's inputs, rows of the block come from the
    # projection, older ones from the log and the conv_state.
    wait_for_earlier_kernels()
    head = tl.program_id(0)
    row = tl.program_id(1)
    half = tl.load(cycle) % 2
    CONV_DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    PROJECTION_SIZE: tl.constexpr = CONV_DIM + V_HEADS * (V_DIM + 2)
    kind = projected.dtype.element_ty
    if head == 2 * K_HEADS + V_HEADS:
        source = projected + row * PROJECTION_SIZE + PROJECTION_SIZE - 2 * V_HEADS
        _gates(source, rate, bias, gates, half * max_rows + row, V_HEADS, BLOCK_HEADS)
        return
    is_value = head >= 2 * K_HEADS
    head_dim = tl.where(is_value, V_DIM, K_DIM)
    at = tl.arange(0, BLOCK_D)
    inside = at < head_dim
    channel = tl.where(is_value, 2 * K_HEADS * K_DIM + (head - 2 * K_HEADS) * V_DIM, head * K_DIM) + at
    count = tl.load(kept)
    mixed = tl.zeros((BLOCK_D,), tl.float32)
    for tap in tl.static_range(CONV_KERNEL):
        back = row + tap - (CONV_KERNEL - 1)  # of the block's rows; below zero it is a committed one
        here = tl.load(projected + back * PROJECTION_SIZE + channel, mask=inside & (back >= 0), other=0.0)
        before = inside & (back < 0)
        old = _committed(conv_state, inputs, half, count, back, max_rows, channel, before, CONV_DIM, CONV_KERNEL)
        weight = tl.load(conv + channel * CONV_KERNEL + tap, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.where(back >= 0, here, old).to(tl.float32) * weight
        if tap == CONV_KERNEL - 1:
            tl.store(inputs + (half * max_rows + row) * CONV_DIM + channel, here, mask=inside)
        elif row == 0:
            tl.store(conv_state + (half * (CONV_KERNEL - 1) + tap) * CONV_DIM + channel, old, mask=inside)
    mixed = mixed.to(kind).to(tl.float32)
    mixed = (mixed / (1.0 + tl.exp(-mixed))).to(kind).to(tl.float32)
    if is_value:
        tl.store(values + ((half * max_rows + row) * V_HEADS + head - 2 * K_HEADS) * V_DIM + at, mixed, mask=inside)
        return
    mixed = mixed / tl.sqrt(tl.sum(tl.where(inside, mixed * mixed, 0.0), 0) + EPS)
    if head < K_HEADS:
        tl.store(queries + (row * K_HEADS + head) * K_DIM + at, mixed / tl.sqrt(K_DIM * 1.0), mask=inside)
    else:
        tl.store(keys + ((half * max_rows + row) * K_HEADS + head - K_HEADS) * K_DIM + at, mixed, mask=inside)


# fmt: off
@jit
def _committed(
    conv_state, inputs, half, count, back, max_rows, channel, wanted, CONV_DIM: tl.constexpr, CONV_KERNEL: tl.constexpr,
):
    # fmt: on
    """Load the committed input ``-back`` before the block: of the last kept rows, before them of the conv_state."""
    logged = count + back  # its row in the log; below zero it is older
    from_log = tl.load(
        inputs + ((1 - half) * max_rows + logged) * CONV_DIM + channel, mask=wanted & (logged >= 0), other=0.0
    )
    place = (1 - half) * (CONV_KERNEL - 1) + CONV_KERNEL - 1 + logged
    from_conv_state = tl.load(conv_state + place * CONV_DIM + channel, mask=wanted & (logged < 0), other=0.0)
    return tl.where(logged >= 0, from_log, from_conv_state)


@jit
def _gates(source, rate, bias, gates, line, V_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Return log decay and beta of all heads of one row."""
    at = tl.arange(0, BLOCK_HEADS)
    inside = at < V_HEADS
    b = tl.load(source + at, mask=inside, other=0.0)
    a = tl.load(source + V_HEADS + at, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(bias + at, mask=inside, other=0.0)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    place = gates + line * 2 * V_HEADS + at
    tl.store(place, tl.load(rate + at, mask=inside, other=0.0) * soft, mask=inside)
    beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    tl.store(place + V_HEADS, beta.to(source.dtype.element_ty).to(tl.float32), mask=inside)


# fmt: off
@jit
def _block_kernel(
    state, queries, keys, values, gates, out, cycle, kept, rows, max_rows,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    # One program: BLOCK_V value dimensions of one value head, whose part of the state [BLOCK_V, BLOCK_D] stays in
    # registers. The rows that were kept of the last cycle are streamed from the log and the state is stored; then this
    # cycle's rows, of which only the outputs are stored.
    start_next_kernel()
    head = tl.program_id(0)
    v_at = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_at = tl.arange(0, BLOCK_D)
    inside = k_at < K_DIM
    half = tl.load(cycle) % 2
    count = tl.load(kept)
    place = state + (head * V_DIM + v_at)[:, None] * K_DIM + k_at[None, :]
    s = tl.load(place, mask=inside[None, :], other=0.0)
    key_head = head // (V_HEADS // K_HEADS)
    old = (1 - half) * max_rows
    # Row by row also what is committed: a closed form would round otherwise, and a row's bits must not tell whether it
    # was committed before or runs in the block.
    for row in range(count):
        k = tl.load(keys + ((old + row) * K_HEADS + key_head) * K_DIM + k_at, mask=inside, other=0.0)
        v = tl.load(values + ((old + row) * V_HEADS + head) * V_DIM + v_at)
        g = tl.load(gates + (old + row) * 2 * V_HEADS + head)
        beta = tl.load(gates + ((old + row) * 2 + 1) * V_HEADS + head)
        s = s * tl.exp(g)
        delta = beta * (v - tl.sum(s * k[None, :], 1))
        s = s + delta[:, None] * k[None, :]
    if count > 0:
        tl.store(place, s, mask=inside[None, :])
    new = half * max_rows
    for row in range(rows):
        k = tl.load(keys + ((new + row) * K_HEADS + key_head) * K_DIM + k_at, mask=inside, other=0.0)
        v = tl.load(values + ((new + row) * V_HEADS + head) * V_DIM + v_at)
        q = tl.load(queries + (row * K_HEADS + key_head) * K_DIM + k_at, mask=inside, other=0.0)
        g = tl.load(gates + (new + row) * 2 * V_HEADS + head)
        beta = tl.load(gates + ((new + row) * 2 + 1) * V_HEADS + head)
        s = s * tl.exp(g)
        delta = beta * (v - tl.sum(s * k[None, :], 1))
        s = s + delta[:, None] * k[None, :]
        tl.store(out + (row * V_HEADS + head) * V_DIM + v_at, tl.sum(s * q[None, :], 1))


# fmt: off
@jit(do_not_specialize=("rows",))  # a prompt of another length would wait for the compiler
def _gated_norm_kernel(
    out, projected, weight, to, eps, projection_size, conv_dim, rows, V_HEADS: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr,
):
    # fmt: on
    # One program: one value head of ROWS rows, in registers.
    start_next_kernel()
    wait_for_earlier_kernels()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK_D)
    of_head = at < V_DIM
    inside = ((row < rows) | (ROWS == 1)) & of_head[None, :]
    kind = to.dtype.element_ty
    place = (row * V_HEADS + head) * V_DIM + at[None, :]
    x = tl.load(out + place, mask=inside, other=0.0).to(kind).to(tl.float32)
    scaled = (x / tl.sqrt(tl.sum(x * x, 1) / V_DIM + eps)[:, None]).to(kind).to(tl.float32)
    factor = tl.load(weight + at, mask=of_head, other=0.0).to(tl.float32)
    scaled = (scaled * factor[None, :]).to(kind).to(tl.float32)
    gate = projected + row * projection_size + conv_dim + head * V_DIM + at[None, :]
    z = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    turned = row * V_HEADS + head % TURNS * (V_HEADS // TURNS) + head // TURNS
    tl.store(to + turned * V_DIM + at[None, :], (scaled * (z / (1.0 + tl.exp(-z)))).to(kind), mask=inside)
