"""A prompt's Gated-DeltaNet kernels against their twins, in Triton's interpreter: started by test_delta_chunk in a
process of its own. Prints one JSON object: check -> largest error, relative to the largest number."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from dflash_local.kernels import delta_chunk, delta_rows
from dflash_local.kernels.delta_chunk import Way
from dflash_local.kernels.delta_step import DeltaShape, DeltaState, DeltaWeights

SHAPE = DeltaShape(keys=1, values=2, key_width=16, value_width=32, taps=4)
EMPTY = torch.empty(0)
Given = tuple[torch.Tensor, DeltaWeights, torch.Tensor, torch.Tensor]
Found = Iterator[tuple[str, float]]


def widen_products() -> None:
    """The interpreter keeps bfloat16 as bits, and would multiply these as numbers."""
    plain = interpreter.InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: plain(self, wide(a), wide(b), *rest)


def with_kernels(answer: bool) -> None:
    """Kernels from now on, or twins."""
    delta_chunk.runs_kernels = delta_rows.runs_kernels = lambda _tensor: answer


def given(rows: int, kind: str, dtype: torch.dtype = torch.float32) -> Given:
    """Projection, weights, window and state of one of the kinds of text."""
    torch.manual_seed(rows)
    projected = torch.randn(rows, SHAPE.columns)
    if kind == "equal keys":
        projected = torch.randn(1, SHAPE.columns) + 0.01 * projected
    rate = {"strong decay": -30.0, "weak decay": -0.01, "equal keys": -0.001}[kind]
    conv = torch.rand(SHAPE.channels, SHAPE.taps).to(dtype)
    weights = DeltaWeights(conv, rate * torch.rand(SHAPE.values), torch.ones(SHAPE.values))
    state = torch.randn(SHAPE.values, SHAPE.value_width, SHAPE.key_width)
    return projected.to(dtype), weights, torch.randn(2, SHAPE.taps - 1, SHAPE.channels).to(dtype), state


def run(parts: Given, cuts: tuple[int, ...], kernels: bool) -> tuple[torch.Tensor, ...]:
    """Outputs, state and window behind the rows, which are brought in parts."""
    with_kernels(kernels)
    projected, weights, window, state = parts
    tape = DeltaState(state.clone(), window[:1].repeat(2, 1, 1), EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)
    out = [delta_chunk.run_rows(part, weights, tape, SHAPE)[: len(part)] for part in projected.split(list(cuts))]
    return torch.cat(out), tape.state, tape.window


def apart(one: tuple[torch.Tensor, ...], two: tuple[torch.Tensor, ...]) -> float:
    """The largest difference, relative to the largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, two, strict=True))


def whole() -> Found:
    """All launches of a prompt in one or two parts."""
    cases = [(rows, "weak decay") for rows in (1, 2, 63, 64, 65, 130, 200)]
    for rows, kind in [*cases, (130, "strong decay"), (130, "equal keys")]:
        parts = given(rows, kind)
        yield f"{rows} rows, {kind}", apart(run(parts, (rows,), True), run(parts, (rows,), False))
    parts = given(130, "weak decay")
    yield "two parts", apart(run(parts, (70, 60), True), run(parts, (130,), True))
    yield "twins, two parts", apart(run(parts, (70, 60), False), run(parts, (130,), False))


def narrow() -> Found:
    """A bfloat16 model's rows, read by the twin, since the interpreter cuts numbers off instead of rounding them."""
    projected, weights, window, state = given(130, "weak decay", torch.bfloat16)
    with_kernels(False)
    rows = delta_rows.read_rows(projected, weights, window[0], SHAPE)
    want = state.clone()
    results = (delta_chunk.walk(rows, delta_chunk.cut(rows, SHAPE, None), want, SHAPE, None), want)
    ways = [replace(Way(columns=16), precision=precision) for precision in ("ieee", "tf32x3", "bf16x3", "bf16x2")]
    for way in (*ways, Way(columns=32)):
        found = state.clone()
        out = delta_chunk.walk(rows, delta_chunk.cut(rows, SHAPE, way), found, SHAPE, way)
        yield f"bfloat16 rows, {way.columns} {way.precision}", apart((out, found), results)


if __name__ == "__main__":
    widen_products()
    json.dump(dict([*whole(), *narrow()]), sys.stdout)
