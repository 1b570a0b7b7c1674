"""Compiles the fused engine's kernels ahead of time for five generations of cards, in the shapes of the pairs that it
runs. Prints a JSON list of what each takes of a program's shared memory, in bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_local.kernels import choose, decode_attention, delta_step, place_heads, rms_norm, skinny_gemm
from dflash_local.models.fused.linear import GateUp, Linear, candidates

CARDS = (80, 86, 89, 90, 120)
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
BF16 = "*bf16"
# Heads, key heads and their width: Qwen3, Qwen3.5-9B and -27B, and the drafters.
ATTENTION = ((32, 8, 128), (16, 4, 256), (24, 4, 256))
Work = tuple[str, Any, dict[str, str], dict[str, Any], int, int]


def work(limit: int) -> Iterator[Work]:
    """Kernel, types of its arguments, constants, warps, stages."""
    for heads, keys, width in ATTENTION:
        lines = skinny_gemm.power_of_two(16 * heads // keys)
        sizes = {"HEADS": heads, "KEY_HEADS": keys, "width": width, "WIDTH": width, "LINES": lines}
        step = decode_attention.step_of(lines, width, limit)
        sight = {"SPLIT": 128, "STEP": step, "CAUSAL": True, "WINDOW": 0, "LAST": 0}
        yield "attend", decode_attention._attend_kernel, {"start": "*i32", "scale": "fp32"}, {**sizes, **sight}, 4, 2
    for tile in candidates(Linear(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")), limit, 16):
        constants = {"depth": 4096, "BLOCK_ROWS": 16, "COLUMNS": tile.columns, "DEPTH": tile.depth, "ADD": True}
        yield f"linear {tile}", skinny_gemm._linear_kernel, {}, constants, tile.warps, tile.stages
    for tile in candidates(GateUp(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")), limit, 16):
        constants = {"depth": 4096, "BLOCK_ROWS": 16, "COLUMNS": tile.columns, "DEPTH": tile.depth}
        yield f"swiglu {tile}", skinny_gemm._swiglu_kernel, {}, constants, tile.warps, tile.stages
    yield "norm", rms_norm._rms_norm_kernel, {"eps": "fp32"}, {"WIDTH": 8192, "LATE": True}, 8, 1
    turned = {"Q": 16, "K": 4, "width": 256, "WIDTH": 256, "TURNED": 64}
    kind = {"GATED": True, "NORMED": True, "LATE": True, "OWN": False}
    yield "heads", place_heads._place_heads_kernel, {"start": "*i32", "eps": "fp32"}, {**turned, **kind}, 1, 1
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


POINTERS = {
    *("queries", "keys", "values", "sums", "scales", "x", "weight", "out", "residual", "gate_up", "qkv", "query_norm"),
    *("key_norm", "cos", "sin", "logits", "projected", "conv", "window", "inputs"),
}


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
    # As at run time: tensors begin at multiples of 16 bytes, so that loads go through shared memory in stages.
    aligned = {places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    return {"card": card, "kernel": name, "shared": built.metadata.shared}


if __name__ == "__main__":
    json.dump([compiled(card, item) for card in CARDS for item in work(LIMITS[card])], sys.stdout)
