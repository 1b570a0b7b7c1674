"""A prompt's Gated-DeltaNet kernels against their references, in Triton's interpreter: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_chunk, delta_rows
from dflash_local.kernels.delta_chunk import ChunkConfig
from dflash_local.kernels.delta_step import GatedDeltaState, GatedDeltaWeights

SHAPE = GatedDeltaNetConfig(1, 2, 16, 32, 4)
EMPTY = torch.empty(0)
Given = tuple[torch.Tensor, GatedDeltaWeights, torch.Tensor, torch.Tensor]
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
    """Kernels from now on, or references."""
    delta_chunk.runs_kernels = delta_rows.runs_kernels = lambda tensor: answer


def given(rows: int, kind: str, dtype: torch.dtype = torch.float32) -> Given:
    """Projection, weights, conv_state and state of one of the kinds of text."""
    torch.manual_seed(rows)
    projected = torch.randn(rows, SHAPE.projection_size)
    if kind == "equal keys":
        projected = torch.randn(1, SHAPE.projection_size) + 0.01 * projected
    rate = {"strong decay": -30.0, "weak decay": -0.01, "equal keys": -0.001}[kind]
    conv = torch.rand(SHAPE.conv_dim, SHAPE.conv_kernel_size).to(dtype)
    weights = GatedDeltaWeights(conv, rate * torch.rand(SHAPE.num_value_heads), torch.ones(SHAPE.num_value_heads))
    state = torch.randn(SHAPE.num_value_heads, SHAPE.value_head_dim, SHAPE.key_head_dim)
    return projected.to(dtype), weights, torch.randn(2, SHAPE.conv_kernel_size - 1, SHAPE.conv_dim).to(dtype), state


def run(parts: Given, cuts: tuple[int, ...], kernels: bool) -> tuple[torch.Tensor, ...]:
    """Outputs, state and conv_state behind the rows, which are brought in parts."""
    with_kernels(kernels)
    projected, weights, conv_state, state = parts
    log = GatedDeltaState(state.clone(), conv_state[:1].repeat(2, 1, 1), EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)
    out = [delta_chunk.run_rows(part, weights, log, SHAPE)[: len(part)] for part in projected.split(list(cuts))]
    return torch.cat(out), log.state, log.conv_state


def apart(one: tuple[torch.Tensor, ...], two: tuple[torch.Tensor, ...]) -> float:
    """The largest difference, relative to the largest number."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, two, strict=True))


def whole() -> Found:
    """All launches of a prompt in one or two parts."""
    # In one chunk with and without rows to spare, and in two and three, whose last is nearly empty.
    cases = ((1, "weak decay"), (64, "weak decay"), (66, "strong decay"), (66, "equal keys"), (130, "weak decay"))
    for rows, kind in cases:
        parts = given(rows, kind)
        found, wanted = run(parts, (rows,), True), run(parts, (rows,), False)
        yield f"{rows} rows, {kind}", apart(found, wanted)
    yield "two parts", apart(run(parts, (70, 60), True), found)
    yield "reference, two parts", apart(run(parts, (70, 60), False), wanted)


def narrow() -> Found:
    """A bfloat16 model's rows, read by the reference, for the interpreter cuts numbers off instead of rounding them."""
    projected, weights, conv_state, state = given(130, "weak decay", torch.bfloat16)
    with_kernels(False)
    rows = delta_rows.read_rows(projected, weights, conv_state[0], SHAPE)
    want = state.clone()
    results = (delta_chunk.scan_chunks(rows, delta_chunk.prepare_chunks(rows, SHAPE, None), want, SHAPE, None), want)
    for config in (replace(ChunkConfig(block_v=16), precision="bf16x2"), ChunkConfig(block_v=32)):
        found = state.clone()
        out = delta_chunk.scan_chunks(rows, delta_chunk.prepare_chunks(rows, SHAPE, config), found, SHAPE, config)
        yield f"bfloat16 rows, {config.block_v} {config.precision}", apart((out, found), results)


def checks() -> Found:
    """The largest error of each check, relative to the largest number."""
    widen_products()
    yield from whole()
    yield from narrow()
