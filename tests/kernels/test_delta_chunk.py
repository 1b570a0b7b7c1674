"""A prompt's Gated-DeltaNet rows: equal to the recurrence token by token, to a block's rows, and to their kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_local.kernels import delta_chunk, delta_step
from dflash_local.kernels.delta_chunk import WAYS, run_rows, way_of
from dflash_local.kernels.delta_rows import Rows, heads_of, read_rows
from dflash_local.kernels.delta_step import DeltaShape, DeltaState, DeltaWeights, Turn

SHAPE = DeltaShape(keys=2, values=4, key_width=16, value_width=8, taps=4)
TOLERANCE = 1e-5
ROOM = 16  # rows of a block


def weights_of(decay: float, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    conv = torch.rand(SHAPE.channels, SHAPE.taps).to(dtype)
    return DeltaWeights(conv, -decay * torch.rand(SHAPE.values), torch.ones(SHAPE.values))


def tape_of(dtype: torch.dtype = torch.float32) -> DeltaState:
    window = torch.randn(1, SHAPE.taps - 1, SHAPE.channels).to(dtype).repeat(2, 1, 1)
    return DeltaState(
        state=torch.randn(SHAPE.values, SHAPE.value_width, SHAPE.key_width),
        window=window,
        inputs=torch.zeros(2, ROOM, SHAPE.channels, dtype=dtype),
        keys=torch.zeros(2, ROOM, SHAPE.keys, SHAPE.key_width),
        values=torch.zeros(2, ROOM, SHAPE.values, SHAPE.value_width),
        gates=torch.zeros(2, ROOM, 2, SHAPE.values),
        queries=torch.zeros(ROOM, SHAPE.keys, SHAPE.key_width),
    )


def copy_of(tape: DeltaState) -> DeltaState:
    names = ("state", "window", "inputs", "keys", "values", "gates", "queries")
    return DeltaState(**{name: getattr(tape, name).clone() for name in names})


def recurrence(rows: Rows, state: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
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
@pytest.mark.parametrize("count", [1, 63, 64, 65, 130, 200])
def test_rows_equal_the_recurrence(count: int, decay: float) -> None:
    torch.manual_seed(count)
    projected, weights, tape = torch.randn(count, SHAPE.columns), weights_of(decay), tape_of()
    want_out, want_state = recurrence(read_rows(projected, weights, tape.window[0], SHAPE), tape.state, count)
    out = run_rows(projected, weights, tape, SHAPE)[:count]
    assert (out - want_out).abs().max() < TOLERANCE
    assert (tape.state - want_state).abs().max() < TOLERANCE


def test_nearly_equal_keys_are_solved_exactly() -> None:
    """Where an inverse by powers of the triangle would cancel: all its numbers are near one."""
    torch.manual_seed(0)
    projected = torch.randn(1, SHAPE.columns) + 1e-3 * torch.randn(130, SHAPE.columns)
    projected[:, -2 * SHAPE.values : -SHAPE.values] = 8.0  # beta near one
    weights, tape = weights_of(1e-4), tape_of()
    rows = read_rows(projected, weights, tape.window[0], SHAPE)
    k = heads_of(rows, SHAPE)[1]
    assert (k[64:128, 0] @ k[64:128, 0].T).min() > 0.99
    want_out, want_state = recurrence(rows, tape.state, 130)
    out = run_rows(projected, weights, tape, SHAPE)[:130]
    assert (out - want_out).abs().max() < TOLERANCE
    assert (tape.state - want_state).abs().max() < TOLERANCE


@pytest.mark.parametrize("cuts", [(1, 129), (2, 64, 64), (70, 60), (3, 1, 126)])
def test_parts_equal_the_whole(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    projected, weights, tape = torch.randn(130, SHAPE.columns), weights_of(0.1), tape_of()
    parts, whole = copy_of(tape), copy_of(tape)
    want = run_rows(projected, weights, whole, SHAPE)[:130]
    out = torch.cat([run_rows(part, weights, parts, SHAPE)[: len(part)] for part in projected.split(list(cuts))])
    assert (out - want).abs().max() < TOLERANCE
    assert (parts.state - whole.state).abs().max() < TOLERANCE
    assert torch.equal(parts.window, whole.window)
    assert torch.equal(whole.window[0], projected[-3:, : SHAPE.channels])
    assert torch.equal(whole.window[0], whole.window[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompts_rows_equal_a_blocks(dtype: torch.dtype) -> None:
    """What was prefilled and what was decoded must not differ: nothing is rounded in one and not in the other."""
    torch.manual_seed(2)
    projected, weights = torch.randn(ROOM, SHAPE.columns).to(dtype), weights_of(0.1, dtype)
    many = tape_of(dtype)
    block, out = copy_of(many), torch.zeros(ROOM, SHAPE.values, SHAPE.value_width)
    serial, kept = torch.zeros(2, dtype=torch.int32).split(1)
    delta_step.read_inputs(projected, weights, block, SHAPE, Turn(serial, kept))
    rows = read_rows(projected, weights, many.window[0], SHAPE)
    q, k, v = (part[:ROOM] for part in heads_of(rows, SHAPE))
    repeats = SHAPE.values // SHAPE.keys
    assert torch.equal(v, block.values[0])
    assert (q - block.queries.repeat_interleave(repeats, 1)).abs().max() < 1e-6
    assert (k - block.keys[0].repeat_interleave(repeats, 1)).abs().max() < 1e-6
    assert (rows.gates[:ROOM] - block.gates[0]).abs().max() < 1e-6
    delta_step.run_block(ROOM, block, SHAPE, Turn(serial, kept), out)
    delta_step.settle(block, SHAPE, Turn(serial + 1, kept), ROOM)
    assert (run_rows(projected, weights, many, SHAPE)[:ROOM] - out).abs().max() < TOLERANCE
    assert (many.state - block.state).abs().max() < TOLERANCE
    assert torch.equal(many.window, block.window)


def test_sizes_that_no_kernel_takes_are_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(dtype: torch.dtype) -> Rows:
        return Rows(*(torch.empty(0, dtype=dtype) for _ in range(3)))

    wide = DeltaShape(keys=16, values=32, key_width=128, value_width=128, taps=4)
    assert way_of(rows(torch.bfloat16), wide) is None  # on a CPU
    monkeypatch.setattr(delta_chunk, "runs_kernels", lambda _tensor: True)
    assert way_of(rows(torch.bfloat16), wide) == WAYS[torch.bfloat16]
    assert way_of(rows(torch.float16), wide) is None
    assert way_of(rows(torch.bfloat16), SHAPE) is None  # values eight wide
    assert way_of(rows(torch.bfloat16), DeltaShape(1, 1, 48, 32, 4)) is None
    narrow = way_of(rows(torch.bfloat16), DeltaShape(1, 1, 16, 16, 4))
    assert narrow is not None and narrow.columns == 16


def test_every_kernel_equals_its_twin_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    script = Path(__file__).parent / "chunks_interpreted.py"
    path = os.pathsep.join([str(script.parents[2]), *sys.path])
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    if "only 0-dimensional arrays can be converted" in found.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy")
    assert found.returncode == 0, found.stderr[-2000:]
    errors = json.loads(found.stdout)
    assert len(errors) > 12
    for name, error in errors.items():
        # Two pieces hold 16 bits where they are cut off and not rounded, as the interpreter does it.
        assert error <= (1e-4 if name.endswith("bf16x2") else TOLERANCE), (name, error)
