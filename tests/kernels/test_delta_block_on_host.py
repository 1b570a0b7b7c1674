"""The recurrence's own source, run on the CPU thread by thread, against plain PyTorch."""

from __future__ import annotations

import sys

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_step
from dflash_local.kernels.delta_step import CycleState, GatedDeltaState
from tests.host_cuda import HostKernel, compiler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="g++ on Linux stands in for the card"
)
SHAPE = GatedDeltaNetConfig(2, 4, 64, 32, 4)
ROWS = 40  # more than are in shared memory at a time


def numbers() -> GatedDeltaState:
    """Keys and queries of length one, decays and rates between zero and one."""
    torch.manual_seed(0)
    keys = torch.randn(2, ROWS, SHAPE.num_key_heads, SHAPE.key_head_dim)
    gates = torch.rand(2, ROWS, 2, SHAPE.num_value_heads)
    gates[:, :, 0] *= -1
    return GatedDeltaState(
        state=torch.randn(SHAPE.num_value_heads, SHAPE.value_head_dim, SHAPE.key_head_dim),
        conv_state=torch.empty(0),
        inputs=torch.empty(0),
        keys=keys / keys.norm(dim=-1, keepdim=True),
        values=torch.randn(2, ROWS, SHAPE.num_value_heads, SHAPE.value_head_dim),
        gates=gates,
        queries=torch.randn(ROWS, SHAPE.num_key_heads, SHAPE.key_head_dim) / 8,
    )


def run(kernel: HostKernel | None, rows: int, kept: int, cycle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the rows, and the state that is left."""
    log, out = numbers(), torch.full((ROWS, SHAPE.num_value_heads, SHAPE.value_head_dim), float("nan"))
    counts = CycleState(*torch.tensor([cycle, kept], dtype=torch.int32).split(1))
    if kernel is None:
        delta_step.run_block(rows, log, SHAPE, counts, out)
    else:
        delta_step._launch(kernel, rows, log, SHAPE, counts, out)
    return out, log.state


def test_the_source_computes_what_the_reference_does() -> None:
    source = delta_step.SOURCE.read_text(encoding="utf-8")
    kernel = HostKernel.of(source, delta_step.compile_options(SHAPE))
    for rows, kept, cycle in ((5, 0, 0), (1, 3, 1), (4, 5, 2), (0, 2, 3), (30, 20, 1), (0, 40, 2)):
        for kernel.seed in (0, 1):
            (found, state), (want, left) = run(kernel, rows, kept, cycle), run(None, rows, kept, cycle)
            assert torch.allclose(found[:rows], want[:rows], atol=1e-5, rtol=1e-4), (rows, kept)
            assert found[rows:].isnan().all(), "no further row is written"
            assert torch.allclose(state, left, atol=1e-5, rtol=1e-4), (rows, kept)


def test_a_kernel_is_tried_before_it_is_used() -> None:
    source, cpu = delta_step.SOURCE.read_text(encoding="utf-8"), torch.device("cpu")
    options = delta_step.compile_options(SHAPE)
    assert delta_step._is_right(HostKernel.of(source, options), SHAPE, cpu)
    for good, bad in (
        ("delta, row.key[j].w", "delta, row.key[j].z"),
        ("(i - 1 - count) *", "(i - count) *"),
        ("% 2, count", "% 1, count"),
    ):
        assert source.count(good) == 1
        assert not delta_step._is_right(HostKernel.of(source.replace(good, bad), options), SHAPE, cpu)
