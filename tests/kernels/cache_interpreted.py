"""The float8_e4m3fn cache and the rows of a block, bit by bit, in Triton's interpreter: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from dflash_local.kernels import decode_attention, qk_norm_rope_cache
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.layout import attention as attention_layout

EIGHT = torch.float8_e4m3fn
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
        return interpreter.TensorHandle(np.add.reduce(terms, 1) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


@triton.jit
def _widen_kernel(codes: Any, out: Any, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(out + at, decode_attention.widened(tl.load(codes + at), out.dtype.element_ty))


def unequal(one: torch.Tensor, two: torch.Tensor) -> int:
    """Numbers whose bits differ."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return int((one.contiguous().view(kind) != two.contiguous().view(kind)).sum())


def all_codes() -> Found:
    """Every code but the two of NaN, which become 480."""
    codes = torch.arange(256, dtype=torch.uint8)
    real = (codes & 0x7F) != 0x7F
    for kind in (torch.float32, torch.float16):
        out = torch.empty(256, dtype=kind)
        _widen_kernel[(1,)](codes, out, 256)
        yield f"codes to {kind}", unequal(out[real], codes.view(EIGHT).to(kind)[real])
        yield f"NaN to {kind}", int((out[~real].abs() != 480).sum())


def all_numbers() -> Found:
    """Every float16, and what lies just beside the middles of two codes, through the kernel that fills the cache."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    codes = torch.arange(0x7F, dtype=torch.uint8).view(EIGHT).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = torch.stack((middles, middles * (1 + 2**-22), middles * (1 - 2**-22)))
    beside = torch.cat((beside.flatten(), -beside.flatten(), torch.tensor([1e38, -1e38, 447.9, 464.0, 465.0])))
    for name, given in (("float16", numbers), ("middles", beside)):
        head_dim = 2048  # few large heads: the interpreter takes its time for each, whatever its size
        layout, rows = HeadLayout(0, 4, head_dim, head_dim), -(-len(given) // (4 * head_dim))
        values = torch.zeros(rows * 4 * head_dim)
        values[: len(given)] = given
        values = values.view(rows, 4 * head_dim)
        qkv = torch.cat((torch.zeros_like(values), values), 1)
        for kernels in (True, False):
            with_kernels(kernels)
            cache = (torch.zeros(4, rows, head_dim, dtype=EIGHT), torch.zeros(4, rows, head_dim, dtype=EIGHT))
            angles = torch.zeros(rows, head_dim)
            start = torch.zeros(1, dtype=torch.int32)
            qk_norm_rope_cache.qk_norm_rope_cache(
                qkv, None, 0.0, (angles + 1, angles), start, torch.empty(1), cache, layout
            )
            written = cache[1].transpose(0, 1).reshape(-1)[: len(given)]
            want = given.clamp(-448, 448).to(EIGHT)
            real = ~given.isnan()
            who = "kernel" if kernels else "reference"
            yield f"{who} rounds {name}", unequal(written[real], want[real])
            yield f"{who} makes NaN of {name}", int((written.float().isnan() != given.isnan()).sum())


def rotated_heads() -> Found:
    for head_dim, rotary_dim in ((16, 8), (24, 24)):
        torch.manual_seed(head_dim)
        layout, rows, room = HeadLayout(2, 2, head_dim, rotary_dim), 5, 20
        angles = torch.rand(room, rotary_dim // 2).repeat(1, 2)
        qkv, start = torch.randn(rows, layout.qkv_size) * 30, torch.tensor([9], dtype=torch.int32)
        written = []
        for kernels in (True, False):
            with_kernels(kernels)
            cache = (torch.zeros(2, room, head_dim, dtype=EIGHT), torch.zeros(2, room, head_dim, dtype=EIGHT))
            queries = torch.zeros(rows, 2, head_dim)
            qk_norm_rope_cache.qk_norm_rope_cache(
                qkv, None, 1e-6, (angles.cos(), angles.sin()), start, queries, cache, layout
            )
            written.append(cache)
        yield f"heads of {head_dim}", sum(unequal(one, two) for one, two in zip(*written, strict=True))


def attention() -> Found:
    """An eight-bit cache gives bitwise what its widened copy gives, and nearly what the reference gives."""
    for number, capability in enumerate(((8, 0), (9, 0))):
        devices_are(capability)
        for kind in (torch.float32, torch.float16)[number : number + 1]:
            torch.manual_seed(1)
            queries, at = torch.randn(5, 4, 16, dtype=kind), torch.tensor([270], dtype=torch.int32)
            small = torch.randn(2, 300, 16).to(EIGHT), torch.randn(2, 300, 16).to(EIGHT)
            found = []
            for cache, kernels in ((small, True), ((small[0].to(kind), small[1].to(kind)), True), (small, False)):
                with_kernels(kernels)
                partials = SplitKV.allocate(5, 4, 16, 300, CPU)
                out = torch.empty(5, 64, dtype=kind)
                found.append(decode_attention.decode_attention(queries, cache, at, out, partials, 300, AttentionMask()))
            name = f"capability {capability[0]}, {kind}"
            yield f"widened beside eight bits, {name}", unequal(found[0], found[1])
            near = 1e-5 if kind == torch.float32 else 4e-3
            yield f"reference, {name}", int(((found[0] - found[2]).abs() > near).sum())


def rows() -> Found:
    """A row's bits: at another index, among other rows, under another max_seq_len, over splits that are fixed."""
    with_kernels(True)
    modules: tuple[Any, ...] = (attention_layout, decode_attention)
    for module in modules:
        module.SPLITS_PER_DOUBLING, module.FIXED_SPLIT_SIZE = 2, 32
    cases: list[tuple[torch.dtype, int, int, tuple[float, ...] | None]] = [
        *((torch.float32, 270, 2, None), (torch.float32, 125, 3, None)),
        *((torch.float32, 0, 1, None), (EIGHT, 254, 2, None), (torch.float32, 270, 2, (1.5, -3.0))),
    ]
    for kind, start, index, sinks in cases:
        torch.manual_seed(start)
        cache = tuple(torch.randn(1, 320, 16).to(kind) for _ in range(2))
        queries, others, moved = torch.randn(3, 4, 2, 16)
        others[index] = moved[0] = queries[index]
        seen = start + index + 1
        later = tuple(torch.cat((part[:, :seen].float(), torch.randn(1, 320, 16)), 1).to(kind) for part in cache)
        want = attend(queries, cache, start, True, start + 4, sinks)[index]
        name = f"row {index} at {start}, {kind}, sinks {sinks}"
        yield f"others, {name}", unequal(want, attend(others, later, start, True, start + 4, sinks)[index])
        yield f"moved, {name}", unequal(want, attend(moved, later, start + index, True, 310, sinks)[0])
        yield f"max_seq_len, {name}", unequal(want, attend(queries, cache, start, True, 310, sinks)[index])
        even = attend(queries, cache, start, False, 310, sinks)[index]
        again = attend(others, later, start, False, 310, sinks)[index]
        yield f"others of an even split, {name}", unequal(even, again)


def attend(
    queries: torch.Tensor,
    cache: Any,
    start: int,
    fixed: bool,
    max_seq_len: int,
    sinks: tuple[float, ...] | None = None,
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
    for group in (all_codes, all_numbers, rotated_heads, attention, rows):
        yield from group()
    interpreter.InterpreterBuilder.create_dot = plain
