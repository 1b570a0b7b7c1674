"""Gated-DeltaNet rows: equal to the recurrence token by token; those of a prompt equal to a block's, in any parts."""

from __future__ import annotations

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_step, gated_delta
from dflash_local.kernels.delta_chunk import run_rows
from dflash_local.kernels.delta_rows import DeltaRows, heads_of, read_rows
from dflash_local.kernels.delta_step import CycleState, GatedDeltaState, GatedDeltaWeights

SHAPE = GatedDeltaNetConfig(2, 4, 16, 8, 4)
TOLERANCE = 1e-5
ROOM = 16  # rows of a block
HEADS, KEYS, VALUES = 3, 16, 8


def weights_of(decay: float, dtype: torch.dtype = torch.float32) -> GatedDeltaWeights:
    conv = torch.rand(SHAPE.conv_dim, SHAPE.conv_kernel_size).to(dtype)
    return GatedDeltaWeights(conv, -decay * torch.rand(SHAPE.num_value_heads), torch.ones(SHAPE.num_value_heads))


def log_of(dtype: torch.dtype = torch.float32) -> GatedDeltaState:
    conv_state = torch.randn(1, SHAPE.conv_kernel_size - 1, SHAPE.conv_dim).to(dtype).repeat(2, 1, 1)
    return GatedDeltaState(
        state=torch.randn(SHAPE.num_value_heads, SHAPE.value_head_dim, SHAPE.key_head_dim),
        conv_state=conv_state,
        inputs=torch.zeros(2, ROOM, SHAPE.conv_dim, dtype=dtype),
        keys=torch.zeros(2, ROOM, SHAPE.num_key_heads, SHAPE.key_head_dim),
        values=torch.zeros(2, ROOM, SHAPE.num_value_heads, SHAPE.value_head_dim),
        gates=torch.zeros(2, ROOM, 2, SHAPE.num_value_heads),
        queries=torch.zeros(ROOM, SHAPE.num_key_heads, SHAPE.key_head_dim),
    )


def copy_of(log: GatedDeltaState) -> GatedDeltaState:
    names = ("state", "conv_state", "inputs", "keys", "values", "gates", "queries")
    return GatedDeltaState(**{name: getattr(log, name).clone() for name in names})


def by_token(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token, in float64: q, k, v, g and beta [H, N, ...], and the state [H, K, V]."""
    q, k, v, g, beta, state = (part.double() for part in given)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None].exp()
        delta = beta[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t]))
        state = state + k[:, t, :, None] * delta[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def recurrence(rows: DeltaRows, state: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows of a projection [N], their state [V heads, V, K] and the outputs [N, V heads, V]."""
    parts = (part[:count].transpose(0, 1) for part in (*heads_of(rows, SHAPE), *rows.gates.unbind(1)))
    outputs, state = by_token(*parts, state.transpose(1, 2))
    return outputs.transpose(0, 1), state.transpose(1, 2)


@pytest.mark.parametrize("decay", [30.0, 0.01])
@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_rows_equal_the_recurrence(count: int, decay: float) -> None:
    torch.manual_seed(count)
    projected, weights, log = torch.randn(count, SHAPE.projection_size), weights_of(decay), log_of()
    want_out, want_state = recurrence(read_rows(projected, weights, log.conv_state[0], SHAPE), log.state, count)
    out = run_rows(projected, weights, log, SHAPE)[:count]
    assert (out - want_out).abs().max() < TOLERANCE
    assert (log.state - want_state).abs().max() < TOLERANCE


def test_nearly_equal_keys_are_solved_exactly() -> None:
    """Where an inverse by powers of the triangle would cancel: all its numbers are near one."""
    torch.manual_seed(0)
    projected = torch.randn(1, SHAPE.projection_size) + 1e-3 * torch.randn(130, SHAPE.projection_size)
    projected[:, -2 * SHAPE.num_value_heads : -SHAPE.num_value_heads] = 8.0  # beta near one
    weights, log = weights_of(1e-4), log_of()
    rows = read_rows(projected, weights, log.conv_state[0], SHAPE)
    k = heads_of(rows, SHAPE)[1]
    assert (k[64:128, 0] @ k[64:128, 0].T).min() > 0.99
    want_out, want_state = recurrence(rows, log.state, 130)
    out = run_rows(projected, weights, log, SHAPE)[:130]
    assert (out - want_out).abs().max() < TOLERANCE
    assert (log.state - want_state).abs().max() < TOLERANCE


@pytest.mark.parametrize("cuts", [(2, 64, 64), (3, 1, 126)])
def test_parts_equal_the_whole(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    projected, weights, log = torch.randn(130, SHAPE.projection_size), weights_of(0.1), log_of()
    parts, whole = copy_of(log), copy_of(log)
    want = run_rows(projected, weights, whole, SHAPE)[:130]
    out = torch.cat([run_rows(part, weights, parts, SHAPE)[: len(part)] for part in projected.split(list(cuts))])
    assert (out - want).abs().max() < TOLERANCE
    assert (parts.state - whole.state).abs().max() < TOLERANCE
    assert torch.equal(parts.conv_state, whole.conv_state)
    assert torch.equal(whole.conv_state[0], projected[-3:, : SHAPE.conv_dim])
    assert torch.equal(whole.conv_state[0], whole.conv_state[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompts_rows_equal_a_blocks(dtype: torch.dtype) -> None:
    """What was prefilled and what was decoded must not differ: nothing is rounded in one and not in the other."""
    torch.manual_seed(2)
    projected, weights = torch.randn(ROOM, SHAPE.projection_size).to(dtype), weights_of(0.1, dtype)
    prompt = log_of(dtype)
    block, out = copy_of(prompt), torch.zeros(ROOM, SHAPE.num_value_heads, SHAPE.value_head_dim)
    cycle, kept = torch.zeros(2, dtype=torch.int32).split(1)
    delta_step.read_inputs(projected, weights, block, SHAPE, CycleState(cycle, kept))
    rows = read_rows(projected, weights, prompt.conv_state[0], SHAPE)
    q, k, v = (part[:ROOM] for part in heads_of(rows, SHAPE))
    repeats = SHAPE.num_value_heads // SHAPE.num_key_heads
    assert torch.equal(v, block.values[0])
    assert (q - block.queries.repeat_interleave(repeats, 1)).abs().max() < 1e-6
    assert (k - block.keys[0].repeat_interleave(repeats, 1)).abs().max() < 1e-6
    assert (rows.gates[:ROOM] - block.gates[0]).abs().max() < 1e-6
    delta_step.run_block(ROOM, block, SHAPE, CycleState(cycle, kept), out)
    delta_step.commit(block, SHAPE, CycleState(cycle + 1, kept), ROOM)
    assert (run_rows(projected, weights, prompt, SHAPE)[:ROOM] - out).abs().max() < TOLERANCE
    assert (prompt.state - block.state).abs().max() < TOLERANCE
    assert torch.equal(prompt.conv_state, block.conv_state)


def random_tokens(rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, g, beta, state."""
    gen = torch.Generator().manual_seed(seed)
    q, k = (gated_delta.normalise(torch.randn(HEADS, rows, KEYS, generator=gen)) for _ in range(2))
    v = torch.randn(HEADS, rows, VALUES, generator=gen)
    g = -torch.rand(HEADS, rows, generator=gen) * 2
    beta = torch.rand(HEADS, rows, generator=gen)
    return q * KEYS**-0.5, k, v, g, beta, torch.randn(HEADS, KEYS, VALUES, generator=gen)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_block_form_equals_the_recurrence_and_leaves_the_state(rows: int) -> None:
    parts = random_tokens(rows)
    before = parts[-1].clone()
    out, _ = gated_delta.block(*parts)
    assert torch.equal(parts[-1], before)
    assert (out - by_token(*parts)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_chunked_form_equals_the_recurrence(rows: int) -> None:
    parts = random_tokens(rows)
    out, state = gated_delta.chunked(*parts)
    want_out, want_state = by_token(*parts)
    assert (out - want_out).abs().max() < 1e-5
    assert (state - want_state).abs().max() < 1e-5


def test_commit_in_parts_is_bitwise_the_commit_in_one() -> None:
    _, k, v, g, beta, state = random_tokens(16)
    parts, whole = state.clone(), state.clone()
    gated_delta.commit(whole, k, v, g, beta)
    for at, end in ((0, 1), (1, 6), (6, 6), (6, 16)):
        gated_delta.commit(parts, k[:, at:end], v[:, at:end], g[:, at:end], beta[:, at:end])
    assert torch.equal(parts, whole)
