"""The recurrence of a block on a GPU: CUDA C++ and Triton against plain PyTorch, and committed rows bit by bit."""

from __future__ import annotations

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_step
from dflash_local.kernels.delta_step import CycleState, GatedDeltaState

pytestmark = pytest.mark.gpu
ROWS = 16
SHAPES = (GatedDeltaNetConfig(16, 32, 128, 128, 4), GatedDeltaNetConfig(2, 6, 64, 32, 4))


def log_of(shape: GatedDeltaNetConfig) -> GatedDeltaState:
    """Keys and queries of length one, decays and rates between zero and one."""
    torch.manual_seed(0)
    sizes = shape.num_key_heads, shape.key_head_dim
    keys, queries = torch.randn(2, ROWS, *sizes, device="cuda"), torch.randn(ROWS, *sizes, device="cuda")
    gates = torch.rand(2, ROWS, 2, shape.num_value_heads, device="cuda")
    gates[:, :, 0] *= -1
    return GatedDeltaState(
        state=torch.randn(shape.num_value_heads, shape.value_head_dim, shape.key_head_dim, device="cuda"),
        conv_state=torch.empty(0, device="cuda"),
        inputs=torch.empty(0, device="cuda"),
        keys=keys / keys.norm(dim=-1, keepdim=True),
        values=torch.randn(2, ROWS, shape.num_value_heads, shape.value_head_dim, device="cuda"),
        gates=gates,
        queries=queries / queries.norm(dim=-1, keepdim=True),
    )


def run(
    shape: GatedDeltaNetConfig, rows: int, kept: int, cycle: int, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the rows, and the state that is left."""
    log = log_of(shape)
    log = GatedDeltaState(*(getattr(log, name).to(device).clone() for name in log.__slots__))
    counts = torch.tensor([cycle, kept], dtype=torch.int32, device=device).split(1)
    out = torch.full((ROWS, shape.num_value_heads, shape.value_head_dim), float("nan"), device=device)
    delta_step.run_block(rows, log, shape, CycleState(*counts), out)
    return out[:rows], log.state


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_what_the_reference_says(
    shape: GatedDeltaNetConfig, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native:
        assert delta_step._native_kernel(torch.device("cuda", 0), shape) is not None
    else:
        monkeypatch.setattr(delta_step, "_native_kernel", lambda _device, _shape: None)
    for rows, kept, cycle in ((1, 0, 0), (16, 6, 1), (7, 16, 2), (0, 3, 3), (16, 1, 4)):
        want, left = run(shape, rows, kept, cycle, "cpu")
        found, state = run(shape, rows, kept, cycle)
        assert torch.allclose(found.cpu(), want, atol=1e-5, rtol=1e-4), (rows, kept)
        assert torch.allclose(state.cpu(), left, atol=1e-5, rtol=1e-4), (rows, kept)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_tell_how_many_rows_there_are_or_what_was_kept(shape: GatedDeltaNetConfig) -> None:
    """Rows that were kept of the last cycle, with the same numbers as rows of this one."""
    whole, _ = run(shape, 16, 0, 0)
    assert torch.equal(run(shape, 5, 0, 0)[0], whole[:5])
    log = log_of(shape)
    log.keys[1], log.values[1], log.gates[1] = log.keys[0], log.values[0], log.gates[0]
    out = torch.empty(ROWS, shape.num_value_heads, shape.value_head_dim, device="cuda")
    kept = torch.tensor([1, 4], dtype=torch.int32, device="cuda").split(1)  # cycle 1 commits rows of half 0
    delta_step.run_block(0, log, shape, CycleState(*kept), out)
    for part in (log.keys, log.values, log.gates):
        part[0] = part[0].roll(-4, 0)
    log.queries.copy_(log.queries.roll(-4, 0))
    fresh = torch.tensor([0, 0], dtype=torch.int32, device="cuda").split(1)
    delta_step.run_block(12, log, shape, CycleState(*fresh), out)
    assert torch.equal(out[:12], whole[4:])
