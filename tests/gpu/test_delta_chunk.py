"""A prompt's Gated-DeltaNet kernels on a GPU, in true widths: equal to float64, to their parts and to themselves."""

from __future__ import annotations

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels.delta_chunk import chunk_config, run_rows
from dflash_local.kernels.delta_rows import heads_of, read_rows
from dflash_local.kernels.delta_step import GatedDeltaState, GatedDeltaWeights
from dflash_local.kernels.gated_delta import chunked

pytestmark = pytest.mark.gpu
SHAPE = GatedDeltaNetConfig(4, 8, 128, 128, 4)
TOLERANCE = 3e-5  # of the largest number


def given(rows: int, decay: float, dtype: torch.dtype) -> tuple[torch.Tensor, GatedDeltaWeights, GatedDeltaState]:
    torch.manual_seed(rows)
    projected = torch.randn(1, SHAPE.projection_size) + torch.randn(rows, SHAPE.projection_size) * (
        0.01 if decay < 0.01 else 1.0
    )
    conv = torch.rand(SHAPE.conv_dim, SHAPE.conv_kernel_size).to("cuda", dtype)
    rate = -decay * torch.rand(SHAPE.num_value_heads, device="cuda")
    conv_state = torch.randn(1, SHAPE.conv_kernel_size - 1, SHAPE.conv_dim).repeat(2, 1, 1).to("cuda", dtype)
    state = torch.randn(SHAPE.num_value_heads, SHAPE.value_head_dim, SHAPE.key_head_dim, device="cuda")
    empty = torch.empty(0, device="cuda")
    log = GatedDeltaState(state, conv_state, empty, empty, empty, empty, empty)
    return projected.to("cuda", dtype), GatedDeltaWeights(conv, rate, torch.ones_like(rate)), log


def apart(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decay", [8.0, 0.1, 0.001])
@pytest.mark.parametrize("rows", [1, 65, 200, 1500])
def test_rows_equal_float64(rows: int, decay: float, dtype: torch.dtype) -> None:
    projected, weights, log = given(rows, decay, dtype)
    read = read_rows(projected, weights, log.conv_state[0], SHAPE)
    assert chunk_config(read, SHAPE) is not None
    q, k, v = (part[:rows].transpose(0, 1).double() for part in heads_of(read, SHAPE))
    g, beta = read.gates[:rows].double().permute(1, 2, 0)
    want_out, want_state = chunked(q, k, v, g, beta, log.state.transpose(1, 2).double())
    out = run_rows(projected, weights, log, SHAPE)[:rows]
    assert apart(out, want_out.transpose(0, 1)) < TOLERANCE
    assert apart(log.state, want_state.transpose(1, 2)) < TOLERANCE


def test_parts_equal_the_whole_and_a_second_run_the_first() -> None:
    runs = []
    for cuts in ((300,), (300,), (129, 171)):
        projected, weights, log = given(300, 0.1, torch.bfloat16)
        parts = [run_rows(part, weights, log, SHAPE)[: len(part)] for part in projected.split(list(cuts))]
        runs.append((torch.cat(parts), log.state, log.conv_state))
    assert all(torch.equal(one, two) for one, two in zip(runs[0], runs[1], strict=True))
    assert apart(runs[2][0], runs[0][0].double()) < TOLERANCE
    assert apart(runs[2][1], runs[0][1].double()) < TOLERANCE
    assert torch.equal(runs[2][2], runs[0][2])
