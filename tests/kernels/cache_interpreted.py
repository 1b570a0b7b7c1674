"""The cache of int8 codes and the rows of a block, bit by bit, in Triton's interpreter: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from dflash_local.kernels import decode_attention, qk_norm_rope_cache
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout, coded
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.layout import attention as attention_layout

CPU = torch.device("cpu")
Found = Iterator[tuple[str, int]]


def devices_are(capability: tuple[int, int]) -> None:
    """What asks a card for its properties is told these."""
    module: Any = decode_attention
    module.device_properties = lambda _device: DeviceProperties(0, 16, capability)


def with_kernels(answer: bool) -> None:
    """Kernels from now on, or references."""
    decode_attention.runs_kernels = qk_norm_rope_cache.runs_kernels = lambda tensor: answer


def sum_every_row_alike() -> None:
    """The interpreter leaves products to numpy's library, whose order of sums may depend on the row, by processor."""

    def dot(_self: Any, a: Any, b: Any, d: Any, *_rest: Any) -> Any:
        terms = a.data[:, :, None].astype(d.data.dtype) * b.data[None]
        return interpreter.TensorHandle(np.add.reduce(terms, 1, dtype=terms.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def unequal(one: torch.Tensor, two: torch.Tensor) -> int:
    """Numbers whose bits differ."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return int((one.contiguous().view(kind) != two.contiguous().view(kind)).sum())


def all_numbers() -> Found:
    """Rows of every size, whose numbers lie on the middles of two codes and beside them, by kernel and reference."""
    torch.manual_seed(0)
    middles = (torch.arange(-128, 128) + 0.5) * (1 + 2**-22 * torch.randint(-1, 2, (64, 256)))
    sizes = torch.cat((torch.logspace(-40, 36, 60), torch.tensor([0.0, 1.0, float("inf"), float("nan")])))
    values = (middles.clamp(-127, 127) * sizes[:, None]).view(16, 4 * 256)
    qkv = torch.cat((torch.zeros_like(values), values), 1)
    written = []
    for kernels in (True, False):
        with_kernels(kernels)
        cache = empty_cache(4, 16, 256)
        start, none = torch.tensor([0], dtype=torch.int32), torch.zeros(16, 1, 256)
        rotation = torch.ones(16, 256), torch.zeros(16, 256)
        qk_norm_rope_cache.qk_norm_rope_cache(qkv, None, 1e-6, rotation, start, none, cache, HeadLayout(0, 4, 256, 256))
        written.append(cache)
    real = written[1][3].isfinite()
    for name, one, two in zip(("keys", "values", "key scales", "value scales"), *written, strict=True):
        yield f"{name} of every size", unequal(one[real.expand_as(one)], two[real.expand_as(two)])
    yield "rows that are no numbers", int((written[0][3].isfinite() != real).sum())
    nonsense = (sizes.view(16, 4).t()[..., None].isfinite() != real).sum()
    yield "rows that are numbers", int(nonsense)


def empty_cache(heads: int, rows: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    shape = (heads, rows)
    codes = (torch.zeros(*shape, head_dim, dtype=torch.int8) for _ in range(2))
    return (*codes, torch.zeros(*shape, 1), torch.zeros(*shape, 1))


def coded_cache(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    codes, scales = zip(*map(coded, (keys, values)), strict=True)
    return (*codes, *scales)


def rotated_heads() -> Found:
    for head_dim, rotary_dim in ((16, 8), (24, 24)):
        torch.manual_seed(head_dim)
        layout, rows, room = HeadLayout(2, 2, head_dim, rotary_dim), 5, 20
        angles = torch.rand(room, rotary_dim // 2).repeat(1, 2)
        qkv, start = torch.randn(rows, layout.qkv_size) * 30, torch.tensor([9], dtype=torch.int32)
        written = []
        for kernels in (True, False):
            with_kernels(kernels)
            cache = empty_cache(2, room, head_dim)
            queries = torch.zeros(rows, 2, head_dim)
            qk_norm_rope_cache.qk_norm_rope_cache(
                qkv, None, 1e-6, (angles.cos(), angles.sin()), start, queries, cache, layout
            )
            written.append(cache)
        yield f"heads of {head_dim}", sum(unequal(one, two) for one, two in zip(*written, strict=True))


def attention() -> Found:
    """A coded cache gives nearly what its decoded copy gives, and what the reference gives."""
    for kind in (torch.float32, torch.float16):
        torch.manual_seed(1)
        queries, at = torch.randn(5, 4, 16, dtype=kind), torch.tensor([270], dtype=torch.int32)
        small = coded_cache(torch.randn(2, 300, 16), torch.randn(2, 300, 16))
        wide = tuple((part * scale).to(kind) for part, scale in zip(small[:2], small[2:], strict=True))
        found = []
        for cache, kernels in ((small, True), (wide, True), (small, False)):
            with_kernels(kernels)
            partials = SplitKV.allocate(5, 4, 16, 300, CPU)
            out = torch.empty(5, 64, dtype=kind)
            found.append(decode_attention.decode_attention(queries, cache, at, out, partials, 300, AttentionMask()))
        near = 1e-5 if kind == torch.float32 else 4e-3
        yield f"decoded, {kind}", int(((found[0] - found[1]).abs() > near).sum())
        yield f"reference, {kind}", int(((found[0] - found[2]).abs() > near).sum())


def rows() -> Found:
    """A row's bits: at another index, among other rows, under another max_seq_len, over splits that are fixed."""
    with_kernels(True)
    modules: tuple[Any, ...] = (attention_layout, decode_attention)
    for module in modules:
        module.SPLITS_PER_DOUBLING, module.FIXED_SPLIT_SIZE = 2, 32
    cases: list[tuple[torch.dtype, int, int, tuple[float, ...] | None]] = [
        *((torch.float32, 270, 2, None), (torch.float32, 125, 3, None)),
        *((torch.float32, 0, 1, None), (torch.int8, 254, 2, None), (torch.float32, 270, 2, (1.5, -3.0))),
    ]
    for kind, start, index, sinks in cases:
        torch.manual_seed(start)
        made = coded_cache if kind == torch.int8 else lambda *parts: parts
        whole = torch.randn(2, 1, 320, 16)
        cache = made(*whole)
        queries, others, moved = torch.randn(3, 4, 2, 16)
        others[index] = moved[0] = queries[index]
        seen = start + index + 1
        later = made(*torch.cat((whole[:, :, :seen], torch.randn(2, 1, 320, 16)), 2))
        want = attend(queries, cache, start, True, start + 4, sinks)[index]
        name = f"row {index} at {start}, {kind}, sinks {sinks}"
        yield f"others, {name}", unequal(want, attend(others, later, start, True, start + 4, sinks)[index])
        yield f"moved, {name}", unequal(want, attend(moved, later, start + index, True, 310, sinks)[0])
        yield f"max_seq_len, {name}", unequal(want, attend(queries, cache, start, True, 310, sinks)[index])
        even = attend(queries, cache, start, False, 310, sinks)[index]
        again = attend(others, later, start, False, 310, sinks)[index]
        yield f"others of an even split, {name}", unequal(even, again)


def attend(
    queries: torch.Tensor, cache: Any, start: int, fixed: bool, max_seq_len: int, sinks: tuple[float, ...] | None = None
) -> torch.Tensor:
    """Rows [M, heads * head_dim] of a block."""
    count, heads, head_dim = queries.shape
    partials = SplitKV.allocate(count, heads, head_dim, cache[0].shape[1], CPU, fixed)
    out, at = torch.empty(count, heads * head_dim), torch.tensor([start], dtype=torch.int32)
    logits = None if sinks is None else torch.tensor(sinks)
    mask = AttentionMask()
    return decode_attention.decode_attention(queries, cache, at, out, partials, max_seq_len, mask, sinks=logits)


def checks() -> Found:
    """Numbers that are not what they should be, by check."""
    plain = interpreter.InterpreterBuilder.create_dot
    sum_every_row_alike()
    devices_are((8, 0))  # no card is asked
    for group in (all_numbers, rotated_heads, attention, rows):
        yield from group()
    interpreter.InterpreterBuilder.create_dot = plain
