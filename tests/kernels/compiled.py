"""Compiles the fused engine's kernels ahead of time for five generations of cards, in the shapes of the pairs that it
runs. Prints a JSON list of what each takes of a program's shared memory, in bytes.
Usage: compiled.py [COMPUTE_CAPABILITY...]"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_local.kernels import (
    attention_cut,
    choose,
    decode_attention,
    delta_chunk,
    delta_rows,
    delta_step,
    eight_bit,
    place_heads,
    rms_norm,
    skinny_gemm,
)
from dflash_local.kernels.eight_bit import EightBit
from dflash_local.models.fused.linear import GateUp, Linear, candidates

CARDS = (80, 86, 89, 90, 120)
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
BF16 = "*bf16"
EIGHT, READS_EIGHT = "*fp8e4nv", 89  # which older cards take as bytes
# Heads, key heads and their width: Qwen3, Qwen3.5-9B and -27B, and the drafters.
ATTENTION = ((32, 8, 128), (16, 4, 256), (24, 4, 256))
Work = tuple[str, Any, dict[str, str], dict[str, Any], int, int]


def work(limit: int) -> Iterator[Work]:
    """Kernel, types of its arguments, constants, warps, stages."""
    for heads, keys, width in ATTENTION:
        yield from attention(heads, keys, width, limit)
    for tile in candidates(Linear(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")), limit, 16):
        constants = {"depth": 4096, "BLOCK_ROWS": 16, "COLUMNS": tile.columns, "DEPTH": tile.depth, "ADD": True}
        yield f"linear {tile}", skinny_gemm._linear_kernel, {}, constants, tile.warps, tile.stages
    for tile in candidates(GateUp(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")), limit, 16):
        constants = {"depth": 4096, "BLOCK_ROWS": 16, "COLUMNS": tile.columns, "DEPTH": tile.depth}
        yield f"swiglu {tile}", skinny_gemm._swiglu_kernel, {}, constants, tile.warps, tile.stages
    yield from eight_bits(limit)
    yield from chunks(limit)
    yield "norm", rms_norm._rms_norm_kernel, {"eps": "fp32"}, {"WIDTH": 8192, "LATE": True}, 8, 1
    turned = {"Q": 16, "K": 4, "width": 256, "WIDTH": 256, "TURNED": 64}
    kind = {"GATED": True, "NORMED": True, "LATE": True, "OWN": False}
    for cache in (BF16, "*u8"):
        types = {"start": "*i32", "eps": "fp32", "keys": cache, "values": cache}
        yield f"heads {cache}", place_heads._place_heads_kernel, types, {**turned, **kind}, 1, 1
    types = {"temperature": "*fp32", "seed": "*i64", "start": "*i32", "values": "*fp32", "places": "*i32"}
    yield "choice", choose._best_kernel, types, {"BLOCK": choose.BLOCK, "NOISY": True}, 4, 1
    delta = {"KEYS": 16, "VALUES": 32, "KEY_WIDTH": 128, "VALUE_WIDTH": 128}
    wide = dict.fromkeys(("state", "queries", "keys", "values", "gates", "out"), "*fp32")
    counts = {"serial": "*i32", "kept": "*i32"}
    block = {**delta, "WIDE": 128, "STEP": delta_step.VALUES}
    yield "recurrence", delta_step._block_kernel, {**wide, **counts}, block, 1, 1
    small = {**dict.fromkeys(("rate", "bias"), "*fp32"), **wide, **counts}
    inputs = {**delta, "WIDE": 128, "HEADS": 32, "TAPS": 4, "EPS": 1e-6}
    yield "inputs", delta_step._inputs_kernel, small, inputs, 1, 1


def attention(heads: int, keys: int, width: int, limit: int) -> Iterator[Work]:
    """Over caches of each kind."""
    lines = skinny_gemm.power_of_two(16 * heads // keys)
    sizes = {"HEADS": heads, "KEY_HEADS": keys, "width": width, "WIDTH": width, "LINES": lines}
    sight = {"CAUSAL": True, "WINDOW": 0, "LAST": 0}
    for kind, octave in ((BF16, 0), ("*u8", attention_cut.OCTAVE), (EIGHT, 0)):
        cut = attention_cut.cut_of(lines, width, 2 if kind == BF16 else 1, limit)
        shares = {"OCTAVE": octave, "STEP": cut.step}
        types = {"start": "*i32", "scale": "fp32", "keys": kind, "values": kind}
        kernel = decode_attention._attend_kernel
        yield f"attend {kind}", kernel, types, {**sizes, **shares, **sight}, cut.warps, cut.stages
    join = {"OCTAVE": attention_cut.OCTAVE, "STEP": 32, "JOINED": decode_attention.JOINED, "GATED": True}
    del sight["CAUSAL"], sizes["KEY_HEADS"], sizes["LINES"]
    types = {"start": "*i32", "gates": BF16}
    yield "join", decode_attention._join_kernel, types, {**sizes, **join, **sight}, 4, 3


def eight_bits(limit: int) -> Iterator[Work]:
    """The products with weights in eight bits."""

    def empty(*sizes: int) -> EightBit:
        codes, scales = torch.empty(sizes, dtype=torch.int8, device="meta"), torch.empty(sizes[0], device="meta")
        return EightBit(codes, scales, torch.bfloat16)

    types = {"weight": "*i8", **dict.fromkeys(("row_scales", "column_scales", "sums"), "*fp32"), "counters": "*i32"}
    for layer, kernel in (
        (Linear(empty(4096, 4096)), eight_bit._linear_kernel),
        (GateUp(empty(8192, 4096)), eight_bit._swiglu_kernel),
    ):
        for way in candidates(layer, limit, 16):
            tile = way.tile
            constants = {"BLOCK_ROWS": 16, "COLUMNS": tile.columns, "DEPTH": tile.depth, "NARROW": way.narrow}
            constants |= {"PACKED": True} | ({"SPLIT": way.split, "ADD": True} if isinstance(layer, Linear) else {})
            kinds = {**types, "x": "*i8" if way.narrow else BF16}
            yield f"{way} {type(layer).__name__}", kernel, kinds, constants, tile.warps, tile.stages
    wide = {"codes": "*i8", "scales": "*fp32"}
    yield "codes", eight_bit._quantise_kernel, wide, {"WIDTH": 16384}, 8, 1


def chunks(limit: int) -> Iterator[Work]:
    """A prompt's rows of Gated-DeltaNet; float32, which is slow to compile and far from any limit, for one card."""
    sizes = {"KEYS": 16, "VALUES": 32, "KEY_WIDTH": 128, "VALUE_WIDTH": 128}
    names = ("rate", "bias", "scales", "gates", "lower", "solved", "scores", "factors", "state", "out")
    for kind, dtype in ((BF16, torch.bfloat16), ("*fp32", torch.float32))[: 2 if limit == LIMITS[90] else 1]:
        way = delta_chunk.WAYS[dtype]
        types = dict.fromkeys(names, "*fp32") | dict.fromkeys(("projected", "conv", "window", "mixed"), kind)
        shape = {"WIDE": 128, "HEADS": 32, "TAPS": 4, "EPS": 1e-6, "ROWS": delta_rows.ROWS}
        yield f"rows {kind}", delta_rows._rows_kernel, types, {**sizes, **shape}, 4, 3
        chunk = {**sizes, "CHUNK": delta_chunk.CHUNK, "PRECISION": way.precision}
        yield f"chunks' scores {kind}", delta_chunk._scores_kernel, types, chunk, 8, 3
        cut = {**chunk, "COLUMNS": way.columns}
        yield f"walk {kind}", delta_chunk._walk_kernel, types, cut, way.warps, way.stages
    triangle = {"VALUES": 32, "CHUNK": delta_chunk.CHUNK, "TILE": delta_chunk.TILE}
    yield "solve", delta_chunk._solve_kernel, dict.fromkeys(names, "*fp32"), triangle, 1, 3


POINTERS = {
    *("queries", "keys", "values", "sums", "scales", "x", "weight", "out", "residual", "gate_up", "qkv", "query_norm"),
    *("key_norm", "cos", "sin", "logits", "projected", "conv", "window", "inputs"),
}


SIZES = ("rows", "columns", "depth", "inner")  # of products; multiples of 16


def compiled(card: int, item: Work) -> dict[str, Any]:
    """What one kernel takes on one card."""
    name, kernel, types, constants, warps, stages = item
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        else:
            pointer = "*fp32" if argument in ("sums", "scales") else BF16
            signature[argument] = types.get(argument, pointer if argument in POINTERS else "i32")
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    values = {places[name]: value for name, value in constants.items()}
    # As at run time: tensors and their rows begin at multiples of 16 bytes, so that loads go through shared memory in
    # stages.
    even = [name for name, kind in signature.items() if kind.startswith("*") or (name in SIZES and kind == "i32")]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    return {"card": card, "kernel": name, "shared": built.metadata.shared}


if __name__ == "__main__":
    every = ((card, item) for card in map(int, sys.argv[1:] or CARDS) for item in work(LIMITS[card]))
    fit = [(card, item) for card, item in every if card >= READS_EIGHT or EIGHT not in item[2].values()]
    json.dump([compiled(card, item) for card, item in fit], sys.stdout)
