"""A prompt's Gated-DeltaNet rows: equal to the recurrence token by token, to a block's rows, and to their kernels."""

from __future__ import annotations

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_step
from dflash_local.kernels.delta_chunk import run_rows
from dflash_local.kernels.delta_rows import DeltaRows, heads_of, read_rows
from dflash_local.kernels.delta_step import CycleState, GatedDeltaState, GatedDeltaWeights

SHAPE = GatedDeltaNetConfig(2, 4, 16, 8, 4)
TOLERANCE = 1e-5
ROOM = 16  # rows of a block


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


def recurrence(rows: DeltaRows, state: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token, in float64."""
    q, k, v = (part.double() for part in heads_of(rows, SHAPE))
    g, beta = rows.gates.double().unbind(1)
    state, outputs = state.double(), []
    for t in range(count):
        state = state * g[t].exp()[:, None, None]
        delta = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + delta.unsqueeze(-1) * k[t].unsqueeze(1)
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(outputs), state


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
