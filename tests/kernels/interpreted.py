"""Every Triton kernel against its reference, in Triton's interpreter: started by test_fused_kernels in a process of its
own, since Triton looks at ``TRITON_INTERPRET`` when a kernel is defined. Prints JSON: room -> check -> error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels import (
    accept,
    block_convolution,
    candidate_walk,
    choose,
    decode_attention,
    decode_gemm,
    delta_step,
    fragment_decode,
    fragment_order,
    gather_rows,
    markov_walk,
    prefill_attention,
    qk_norm_rope_cache,
    rms_norm,
    skinny_gemm,
    split_kv,
    triton_trial,
)
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.decode_attention import AttentionMask, SplitKV
from dflash_local.kernels.fragment_decode import LaunchConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.kernels.split_kv import DecodeConfig, DeviceProperties
from dflash_local.layout.cycle import RECORD_HEADER, progress_buffers
from dflash_local.models.fused import gguf_formats
from tests.kernels import (
    cache_interpreted,
    choices_interpreted,
    chunks_interpreted,
    experts_interpreted,
    rows_interpreted,
)
from tests.kernels.choices_interpreted import Checks, Results
from tests.kernels.quick_interpreter import patch_once
from tests.quantized_weights import fp8, fp8_rows, gguf, int4, int8, mxfp4, nvfp4

MODULES: tuple[Any, ...] = (
    *(accept, block_convolution, candidate_walk, choose, decode_attention, decode_gemm, delta_step, fragment_decode),
    *(fragment_order, gather_rows, gguf_formats, markov_walk, prefill_attention, qk_norm_rope_cache, rms_norm),
    skinny_gemm,
)


each: Any
for each in (decode_attention, prefill_attention, fragment_decode):  # the last stands for the decoder below
    each.device_properties = lambda _device: DeviceProperties(0, 16, (8, 0))  # no card is asked


def both(run: Callable[[], Results]) -> float:
    """The largest difference between a kernel's results and its reference's; NaN where either has one."""
    results = []
    for kernels in (True, False):
        for module in MODULES:
            module.runs_kernels = lambda _tensor, answer=kernels: answer
        torch.manual_seed(0)
        results.append([part.double() for part in run()])
    pairs = [(one, two) for one, two in zip(*results, strict=True) if one.numel()]
    return float(torch.stack([(one - two).abs().max() for one, two in pairs]).max())  # max() would lose a NaN


def products() -> Checks:
    def run(rows: int, residual: bool) -> Results:
        x, weight = torch.randn(rows, 64), torch.randn(48, 64)
        out = torch.randn(rows, 48)
        skinny_gemm.linear(x, weight, out, GemmConfig(16, 32), out if residual else None)
        gated = skinny_gemm.swiglu(x, torch.randn(96, 64), torch.empty(rows, 48), GemmConfig(16, 32))
        return out, gated

    def part_of_rows() -> Results:
        x, rows = torch.randn(5, 64), torch.randn(5, 128)
        skinny_gemm.linear(x, torch.randn(48, 64), rows[:, 16:64], GemmConfig(16, 32), rows.clone()[:, 16:64])
        return (rows,)

    yield "products into a part of each row", part_of_rows
    for rows, residual in ((1, False), (5, True), (16, True), (20, False)):
        yield f"products of {rows} rows", partial(run, rows, residual)


PACKED: dict[str, Codable] = {
    "int4": int4(32, 128, 128),
    "int4, wide groups": int4(32, 256, 256),
    "int4, zeros, ragged": int4(24, 160, 32, True),
    "int8, zeros": int8(32, 128, 128, True),
    "int8, rows, ragged": int8(24, 160, 160, scales=torch.float32),
    "fp8": fp8(32, 256, (16, 128)),
    "fp8, rows": fp8_rows(24, 160),
    "mxfp4": mxfp4(32, 128),
    "nvfp4": nvfp4(32, 128),
    "nvfp4, ragged": nvfp4(24, 160, row_scales=False),
    "Q4_1, ragged": gguf("Q4_1", 24, 160),
    "Q5_0, ragged": gguf("Q5_0", 24, 160),
    "Q5_1": gguf("Q5_1", 32, 128),
    "Q4_K, ragged": gguf("Q4_K", 24, 256),
    "Q5_K": gguf("Q5_K", 32, 256),
    "Q6_K, ragged": gguf("Q6_K", 24, 512),
    "IQ4_NL, ragged": gguf("IQ4_NL", 24, 160),
    "IQ4_XS": gguf("IQ4_XS", 32, 256),
}


def packing() -> Checks:
    """Blocks of a file and fragments, as bytes."""

    def read(dtype: str) -> Results:
        return tuple(each.view(torch.uint8) for each in gguf_formats._parts(gguf(dtype, 3, 512)))

    def packed(weight: Codable) -> Results:
        fragments = FragmentWeight.of(weight)
        return fragments.codes.view(torch.uint8), fragments.unpacked().codes.view(torch.uint8)

    for dtype in GGUF_TYPES:
        yield f"bits of blocks of {dtype}", partial(read, dtype)
    for name, weight in PACKED.items():
        yield f"bits of fragments of {name}", partial(packed, weight)


def decodes() -> Checks:
    def run(weight: Codable, config: LaunchConfig | None = None, capability: tuple[int, int] = (9, 0)) -> Results:
        each.device_properties = lambda _device: DeviceProperties(0, 16, capability)
        packed, (n, k) = FragmentWeight.of(weight), weight.shape
        out = torch.zeros(n, k)
        part = fragment_decode.decode(packed, slice(16, n), out, config)
        # As bits, since the largest numbers would hide what becomes of small ones.
        return part.view(torch.int32), fragment_decode.linear(torch.eye(k), packed).view(torch.int32)

    def gathered_rows(weight: Codable) -> Results:
        packed, ids = FragmentWeight.of(weight), torch.tensor([17, 0, 23, 8, 17])
        return (fragment_decode.gather(packed, ids, torch.zeros(5, weight.shape[1])).view(torch.int32),)

    for name in ("int8, zeros", "Q4_1, ragged", "Q6_K, ragged"):
        yield f"decode rows of {name}", partial(gathered_rows, PACKED[name])
    every_scale = {"mxfp4 with every scale": mxfp4(32, 256, scales=(0, 189))}
    weight: Codable
    for name, weight in (PACKED | every_scale).items():
        yield f"decode {name}", partial(run, weight)
    for name in ("fp8", "fp8, rows"):
        yield f"decode {name}, as older cards", partial(run, PACKED[name], capability=(8, 0))
    blocks = fp8(48, 1024, (32, 256), scales=torch.bfloat16)
    wide: dict[str, Codable] = {"fp8": blocks, "int4": int4(48, 1024, 256), "nvfp4": nvfp4(48, 640)}
    launches = (
        LaunchConfig(steps=1, num_warps=1, across=1),
        LaunchConfig(steps=2, along_k=False, last_first=True, streamed=False),
        LaunchConfig(steps=8, across=4, native=False),
    )
    for (name, weight), config in zip(wide.items(), launches, strict=True):
        yield f"decode {name}, {config}", partial(run, weight, config)


def gathered() -> Checks:
    def run(rows: int, size: int) -> Results:
        table, ids = torch.randn(50, size).to(torch.bfloat16), torch.randint(0, 50, (rows,))
        out = torch.full((rows, size), float("nan"), dtype=table.dtype)
        return (gather_rows._copied(table, ids, out) if gather_rows.runs_kernels(ids) else table[ids],)

    for rows, size in ((1, 64), (16, 5120), (7, 2056)):
        yield f"{rows} gathered rows of {size}", partial(run, rows, size)


def decoded_products() -> Checks:
    def run(weight: Codable, rows: int) -> Results:
        packed, (n, k) = FragmentWeight.of(weight), weight.shape
        x, wide = torch.randn(rows, k) / weight.dequantized().norm(dim=1).max(), torch.randn(rows, n + 24)
        decode_gemm.linear(x, packed, wide[:, 8 : n + 8], wide[:, 8 : n + 8])
        return wide, decode_gemm.swiglu(x, packed, torch.empty(rows, n // 2))  # whose product has no residual

    # Their decoding is that above: here is each code with each kind of scales.
    like_another = ("int4, wide groups", "nvfp4", "Q5_1", "Q4_K, ragged", "IQ4_NL, ragged")
    for name, weight in PACKED.items():
        if name in like_another:
            continue
        rows = 40 if name in ("int4", "fp8") else 5
        yield f"products with {name}, {rows} rows", partial(run, weight, rows)

    def with_tail(rows: int) -> Results:
        packed = FragmentWeight.of(PACKED["int4"]).with_tail(torch.randn(24, 128).bfloat16())
        x, residual = torch.randn(rows, 128) / 64, torch.randn(rows, 56)
        return (decode_gemm.linear(x, packed, residual.clone(), residual), fragment_decode.linear(x, packed))

    yield "products with int4 and a tail", lambda: with_tail(5)
    yield "products with int4, one row", lambda: run(PACKED["int4"], 1)


def norms() -> Checks:
    def run(norm_plus_one: bool) -> Results:
        x, weight, out = torch.randn(5, 40), torch.rand(40), torch.empty(5, 40)
        return (rms_norm.rms_norm(x, weight, 1e-6, out, norm_plus_one=norm_plus_one),)

    for norm_plus_one in (False, True):
        yield f"norm, norm_plus_one {norm_plus_one}", partial(run, norm_plus_one)


def heads() -> Checks:
    kinds = {
        "plain": HeadLayout(4, 2, 16, 16),
        "partial rotary, gated, norm_plus_one": HeadLayout(4, 2, 16, 8, gated=True, norm_plus_one=True),
        "context of many layers": HeadLayout(0, 6, 16, 16, per_head_norms=True),
    }

    def run(kind: HeadLayout, normed: bool, biased: bool = False) -> Results:
        rows, room = 5, 40
        queries = torch.zeros(rows, max(kind.num_heads, 1), kind.head_dim)
        cache = tuple(torch.zeros(kind.num_kv_heads, room, kind.head_dim) for _ in range(2))
        angles = torch.rand(room, kind.rotary_dim // 2).repeat(1, 2)
        keys = torch.rand(kind.num_kv_heads, kind.head_dim) if kind.per_head_norms else torch.rand(kind.head_dim)
        norms = (torch.rand(kind.head_dim), keys) if normed else None
        start = torch.tensor([9], dtype=torch.int32)
        qkv = torch.randn(rows, kind.qkv_size)
        bias = torch.randn(kind.qkv_size) * 4 if biased else None
        rotation = angles.cos(), angles.sin()
        qk_norm_rope_cache.qk_norm_rope_cache(qkv, norms, 1e-6, rotation, start, queries, cache, kind, bias)
        gates = qkv[:, : 2 * kind.num_heads * kind.head_dim].view(rows, -1, 2, kind.head_dim)[:, :, 1]
        return queries[:, : kind.num_heads], *cache, *([gates] if kind.gated else [])

    for name, kind in kinds.items():
        yield f"heads, {name}", partial(run, kind, True)
        yield f"heads with biases, {name}", partial(run, kind, True, True)

    def in_rings() -> Results:
        """Some of which a block's rows go around, with the caches of all heads in one."""
        kind, rings = kinds["context of many layers"], ((0, 7), (7, 7), (14, 40), (54, 40), (94, 9), (103, 9))
        cache = torch.zeros(112, kind.head_dim), torch.zeros(112, kind.head_dim)
        angles, start = torch.rand(40, kind.rotary_dim // 2).repeat(1, 2), torch.tensor([26], dtype=torch.int32)
        qkv, norms = torch.randn(5, kind.qkv_size), (torch.rand(kind.head_dim), torch.rand(6, kind.head_dim))
        rotation = angles.cos(), angles.sin()
        qk_norm_rope_cache.qk_norm_rope_cache(
            qkv, norms, 1e-6, rotation, start, qkv, cache, kind, None, torch.tensor(rings)
        )
        return cache

    yield "heads in rings", in_rings
    yield "heads without norms", lambda: run(kinds["plain"], False)
    yield "heads with biases, without norms, of 64", lambda: run(HeadLayout(8, 1, 64, 64), False, True)


def attention() -> Checks:
    def run(start: int, rows: int, groups: int, mask: AttentionMask, **more: Any) -> Results:
        head_dim, sinks, room = more.get("head_dim", 16), more.get("sinks"), more.get("room", 320)
        heads = 2 * groups
        cache = (torch.randn(2, room, head_dim), torch.randn(2, room, head_dim))
        partials = SplitKV.allocate(rows, heads, head_dim, 320, torch.device("cpu"))
        gates = torch.randn(rows, heads * 2 * head_dim + 8) if more.get("gated") else None
        at, out = torch.tensor([start], dtype=torch.int32), torch.empty(rows, heads * head_dim)
        queries = torch.randn(rows, heads, head_dim)
        logits = torch.tensor(sinks).repeat(heads)[:heads] if sinks else None
        decode_attention.decode_attention(queries, cache, at, out, partials, 300, mask, gates, sinks=logits)
        return (out,)

    # What sinks do to the sum: nothing, about as much as the keys, and all; at a window's borders and beside splits
    # that a row sees nothing of.
    mask, sinks = AttentionMask, (-1e4, 0.0, 4.0, 1e4, -40.0, 40.0)
    cases: dict[str, Callable[[], Results]] = {
        "causal": lambda: run(270, 8, 2, mask()),
        "gated, three heads to a key": lambda: run(131, 5, 3, mask(), gated=True),
        "one row at the beginning": lambda: run(0, 1, 4, mask()),
        "sliding window": lambda: run(200, 8, 2, mask(causal=True, sliding_window=40)),
        "two-sided window": lambda: run(200, 8, 2, mask(causal=False, sliding_window=5)),
        "a ring": lambda: run(200, 8, 2, mask(causal=True, sliding_window=100), room=130),
        "a ring, two-sided, at its end": lambda: run(256, 8, 2, mask(causal=False, sliding_window=120), room=129),
        "context window": lambda: run(200, 8, 2, mask(causal=False, context_window=30)),
        "sinks": lambda: run(270, 8, 3, mask(), sinks=sinks),
        "sinks, a window over many splits": lambda: run(280, 8, 3, mask(sliding_window=128), head_dim=64, sinks=sinks),
        "sinks, a window of one key": lambda: run(200, 8, 3, mask(sliding_window=1), sinks=sinks),
    }
    for name, case in cases.items():
        yield f"attention, {name}", case

    def in_parts() -> Results:
        with patch.dict(split_kv.CONFIGS, {(2, 64): (DecodeConfig(16, 32),)}):
            return run(131, 8, 3, mask(), gated=True)

    yield "attention, 24 queries by sixteens", in_parts


def prompts() -> Checks:
    """Rows of a prompt by tiles of 32 queries and 16 keys: with a part of a row, before, on and behind borders."""

    def run(start: int, rows: int, groups: int, window: int | None = None, **more: Any) -> Results:
        head_dim, room, sinks = more.get("head_dim", 16), more.get("room", 128), more.get("sinks")
        heads = 2 * groups
        cache = (torch.randn(2, room, head_dim), torch.randn(2, room, head_dim))
        if more.get("coded"):
            codes, scales = zip(*map(qk_norm_rope_cache.coded, cache), strict=True)
            cache = (*codes, *scales)
        gates = torch.randn(rows, heads * 2 * head_dim + 8) if more.get("gated") else None
        at, queries = torch.tensor([start], dtype=torch.int32), torch.randn(rows, heads, head_dim)
        logits = torch.tensor(sinks).repeat(heads)[:heads] if sinks else None
        with patch.dict(split_kv.PREFILL_CONFIGS, dict.fromkeys(split_kv.PREFILL_CONFIGS, (DecodeConfig(32, 16),))):
            return (prefill_attention.prefill_attention(queries, cache, at, 0.5, window, gates, logits),)

    cases: dict[str, Callable[[], Results]] = {
        "from the beginning": lambda: run(0, 41, 2),
        "behind others, three heads to a key, gated": lambda: run(45, 37, 3, gated=True),
        "one row": lambda: run(63, 1, 4),
        "codes": lambda: run(30, 20, 2, coded=True, head_dim=24),
        "a window": lambda: run(50, 40, 2, 21),
        "a window that begins with the text": lambda: run(3, 40, 1, 20),
        "codes in a ring, sinks": lambda: run(170, 40, 3, 30, room=72, coded=True, sinks=(-1e4, 0.0, 4.0, 1e4)),
        "a window of one key, sinks": lambda: run(16, 17, 2, 1, sinks=(0.0, 3.0)),
    }
    for name, case in cases.items():
        yield f"prompt attention, {name}", case

    def gates() -> Results:
        products, out = torch.randn(3, 2 * 1500), torch.zeros(3, 2, 1500)
        return (skinny_gemm.gated(products, out[:, 1]),)

    yield "gates times ups, into a part of each row", gates


def convolutions() -> Checks:
    def run(rows: int, size: int, groups: int, added: bool) -> Results:
        x, base, own = torch.randn(rows, 48), torch.randn(size, 48), torch.randn(rows, 2, size, groups)
        out = torch.randn(rows, 48)
        return (block_convolution.block_convolution(x, base, own[:, 1], out, out if added else None),)

    for rows, size, groups, added in ((1, 2, 3, False), (8, 2, 6, True), (5, 3, 48, False), (3, 4, 1, True)):
        yield f"convolution of {rows} rows by {size}", partial(run, rows, size, groups, added)


def acceptance() -> Checks:
    def run() -> Results:
        seen = []
        rings = progress_buffers(8, records=4)
        for case in range(60):
            rows = int(torch.randint(1, 9, ()))
            start, kept, cycle = torch.tensor([20, 3, case], dtype=torch.int32).split(1)
            tokens = torch.randint(0, 3, (8,))
            progress = accept.Progress.over(start, kept, cycle, tokens, Tensors(rings, start.device).take(rings))
            progress.chosen.copy_(torch.randint(0, 3, (8,)))
            if case % 3:
                progress.chosen[: rows - 1] = tokens[1:rows]
            progress.stops[:2] = torch.tensor([2, 7])
            if case % 2:
                progress.stops.fill_(-1)
            progress.limit.fill_(23 if case % 5 == 0 else 1000)
            progress.done.fill_(int(case % 11 == 0))
            progress.margins.copy_(torch.randn(8))
            if case % 13 == 0:
                progress.chosen[rows - 1] = -1
            accept.accept(progress, rows)
            words = (progress.start, progress.kept, progress.cycle, progress.done, progress.tokens[:1])
            record = progress.record_ring[case % 4].clone()
            record[RECORD_HEADER + rows : -8] = 0
            seen += [*(word.clone() for word in words), record]
        return tuple(seen)

    yield "acceptance", run


def recurrence() -> Checks:
    shape = GatedDeltaNetConfig(2, 4, 16, 8, 4)

    def run(rows: int, kept: int, cycle: int) -> Results:
        wide = torch.randn
        convolved = wide(2, 3, shape.conv_dim), wide(2, 6, shape.conv_dim)  # what is before a block, and its inputs
        logged = wide(2, 6, 2, 16) / 4, wide(2, 6, 4, 8), -torch.rand(2, 6, 2, 4), wide(6, 2, 16)  # k, v, gates, q
        state = delta_step.GatedDeltaState(wide(4, 8, 16), *convolved, *logged)
        number, count = torch.tensor([cycle, kept], dtype=torch.int32).split(1)
        cycle_state = delta_step.CycleState(number, count)
        weights = delta_step.GatedDeltaWeights(wide(shape.conv_dim, 4), -torch.rand(4), wide(4))
        projected, out, to = wide(rows, shape.projection_size), torch.zeros(6, 4, 8), torch.zeros(rows, 32)
        delta_step.read_inputs(projected, weights, state, shape, cycle_state)
        delta_step.run_block(rows, state, shape, cycle_state, out)
        norm, turned = torch.rand(8), torch.zeros(rows, 32)
        delta_step.gated_norm(out, projected, norm, 1e-6, shape, to)
        delta_step.gated_norm(out, projected, norm, 1e-6, shape, turned, 2)
        half = cycle % 2
        log = (state.inputs[half, :rows], state.keys[half, :rows], state.values[half, :rows], state.gates[half, :rows])
        return to, turned, out[:rows], state.state, state.conv_state[half], *log

    def settled(kept: int, rows: int) -> Results:
        """What ``commit`` commits less what a next block of so many rows commits."""
        torch.manual_seed(kept)
        log = (torch.randn(2, 6, 2, 16) / 4, torch.randn(2, 6, 4, 8), -torch.rand(2, 6, 2, 4), torch.randn(6, 2, 16))
        given, inputs = torch.randn(4, 8, 16), torch.zeros(2, 6, shape.conv_dim)
        first, second = (
            delta_step.GatedDeltaState(given.clone(), inputs[:, :3].clone(), inputs, *log) for _ in range(2)
        )
        number, count = torch.tensor([3, kept], dtype=torch.int32).split(1)
        delta_step.commit(first, shape, delta_step.CycleState(number, count), kept)
        delta_step.run_block(rows, second, shape, delta_step.CycleState(number, count), torch.zeros(6, 4, 8))
        return (first.state - second.state,)

    for kept in (1, 4):
        yield f"committed bits, {kept} rows", partial(settled, kept, 6)
    for rows, kept, cycle in ((1, 0, 0), (6, 1, 3)):
        yield f"recurrence, {rows} rows after {kept}", partial(run, rows, kept, cycle)


def rooms() -> dict[str, dict[str, float]]:
    patch_once()
    assert triton_trial.why_not("cpu") is None, "the kernel by which Triton is tried"
    groups = (
        *(products, packing, decodes, gathered, decoded_products, norms, heads, attention, prompts),
        *(choices_interpreted.runs, convolutions, acceptance, recurrence),
    )
    close = {name: both(run) for group in groups for name, run in group()}
    close |= dict(experts_interpreted.checks())
    bits: dict[str, float] = {**dict(cache_interpreted.checks()), **dict(rows_interpreted.checks())}
    return {"close": close, "bits": bits, "chunks": dict(chunks_interpreted.checks())}


if __name__ == "__main__":
    json.dump(rooms(), sys.stdout)
