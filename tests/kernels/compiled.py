"""Compiles the fused engine's kernels ahead of time for five generations of cards, in the shapes of the pairs that it
runs. Prints a JSON list of what each takes of a program's shared memory, in bytes.
Usage: compiled.py each|all [COMPUTE_CAPABILITY...]"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

from dflash_local.drafters.dflash2.layout import MOST_CANDIDATES
from dflash_local.drafters.dspark.layout import MARKOV_BLOCK
from dflash_local.kernels import (
    block_convolution,
    candidate_walk,
    choose,
    decode_attention,
    decode_gemm,
    delta_chunk,
    delta_rows,
    delta_step,
    expert_prefill,
    fragment_decode,
    gather_rows,
    markov_walk,
    move_bits,
    prefill_attention,
    qk_norm_rope_cache,
    rms_norm,
    skinny_gemm,
    split_kv,
)
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.jit import power_of_two, rows_of_program
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.layout.attention import SPLITS_PER_DOUBLING
from dflash_local.layout.cycle import CHOICE_BLOCK
from dflash_local.models.fused.kernel_choice import candidates
from dflash_local.models.fused.linear import GateUp, Linear
from tests.cuda_cards import SHARED_MEMORY, TRITON_CARDS
from tests.quantized_weights import fp8, gguf, int4, int8, nvfp4

LIMITS = {card: SHARED_MEMORY[card] * 1024 for card in TRITON_CARDS}
BF16 = "*bf16"
EIGHT, READS_EIGHT = "*fp8e4nv", 89  # codes of weights, which older cards take as bytes
# HeadLayout, key heads and their width: Qwen3, Qwen3.5-9B and -27B, gpt-oss with sinks, and the drafters.
ATTENTION = ((32, 8, 128), (16, 4, 256), (24, 4, 256), (64, 8, 64))
Work = tuple[str, Any, dict[str, str], dict[str, Any], int, int]


def work(limit: int, kernels: str) -> Iterator[Work]:
    """Kernel, types of its arguments, constants, warps, stages.

    Args:
        kernels: ``each``: every kernel, and of attention, which has several shapes, the one with the most queries to a
            key, of products the configurations with the most shared memory. ``all``: of every shape and configuration,
            codes of keys in even splits and a prompt's chunks in float32, too.
    """
    most = None if kernels == "all" else 1
    for heads, kv_heads, head_dim in ATTENTION if kernels == "all" else ATTENTION[-1:]:
        yield from attention((heads, kv_heads, head_dim), limit, 3 if most is None else 2)
    sizes = {"in_features": 4096, "BLOCK_M": 16}
    plain = candidates(Linear(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")), limit, 16)
    for config in sorted(plain, key=tiles_bytes, reverse=True)[:most]:
        constants = {**sizes, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "ADD": True}
        yield f"linear {config}", skinny_gemm._linear_kernel, {}, constants, config.num_warps, config.num_stages
    gated = candidates(GateUp(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")), limit, 16)
    for config in sorted(gated, key=tiles_bytes, reverse=True)[:most]:
        constants = {**sizes, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        yield f"swiglu {config}", skinny_gemm._swiglu_kernel, {}, constants, config.num_warps, config.num_stages
    yield from chunks(kernels == "all" and limit == LIMITS[90])
    yield from packed_weights(most)
    yield from experts_of_a_prompt(limit)
    yield from small(most)


def tiles_bytes(config: GemmConfig) -> int:
    """About what a program holds of its two factors."""
    return config.num_stages * config.block_k * (16 + config.block_n) * 2


def experts_of_a_prompt(limit: int) -> Iterator[Work]:
    """Gate and up with biases, and down, of many rows of each expert."""
    types = {
        "matrices": BF16,
        "order": "*i64",
        "begins": "*i32",
        "tile_begins": "*i32",
        "alpha": "fp32",
        "limit": "fp32",
    }
    for paired in (True, False):
        config = expert_prefill.tile_config(128, paired, limit)
        sizes = {"BLOCK_E": 512, "EXPERTS": 257, "BLOCK_M": 128, "BLOCK_N": config.block_n}
        kinds = {"EVEN_K": True, "PAIRED": paired, "CLAMPED": paired, "BIASED": True}
        constants = {**sizes, "BLOCK_K": expert_prefill.BLOCK_K, **kinds}
        kernel = expert_prefill._products_kernel
        yield f"experts, paired {paired}", kernel, types, constants, config.num_warps, config.num_stages
    sums = {"results": BF16, "weights": "*fp32"}
    yield "sum of experts", expert_prefill._weighed_sum_kernel, sums, {"BLOCK": expert_prefill.SUM_BLOCK}, 4, 1


def small(most: int | None) -> Iterator[Work]:
    """Kernels of little memory; of those with several shapes so many, the largest first."""
    yield "gates", skinny_gemm._gated_kernel, {"products": BF16}, {"BLOCK": skinny_gemm.GATED_BLOCK}, 4, 1
    types = {"table": BF16, "ids": "*i64"}
    yield "gathered rows", gather_rows._gather_kernel, types, {"BLOCK": gather_rows.MAX_BLOCK}, 4, 1
    types = {**dict.fromkeys(("source", "out", "flips"), "*u8"), "sources": "*i32"}
    for width in move_bits.WIDTHS[:most]:
        sizes = {"WIDTH": width, "BLOCK": move_bits.BLOCK}
        yield f"moved runs of {width} bits", move_bits._move_kernel, types, sizes, 4, 1
    yield "norm", rms_norm._rms_norm_kernel, {"eps": "fp32"}, {"BLOCK": 8192, "NORM_PLUS_ONE": True}, 8, 1
    layout = {"NUM_HEADS": 16, "NUM_KV_HEADS": 4, "head_dim": 256, "BLOCK_D": 256, "ROTARY_DIM": 64}
    kind = {"GATED": True, "NORMED": True, "NORM_PLUS_ONE": True, "PER_HEAD_NORMS": False, "BIASED": False}
    kind["RINGS"] = True
    for cache, rows in ((BF16, 1), ("*i8", 1), (BF16, 1000), ("*i8", 1000)):
        types = {"start": "*i32", "eps": "fp32", "keys": cache, "values": cache, "rings": "*i64"}
        types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
        together, warps = rows_of_program(rows, layout["BLOCK_D"])
        kernel = qk_norm_rope_cache._qk_norm_rope_cache_kernel
        constants = {**layout, **kind, "BIASED": cache == BF16, "CODED": cache != BF16, "ROWS": together}
        yield f"heads {cache}", kernel, types, constants, warps, 1
    types = {"temperature": "*fp32", "seed": "*i64", "start": "*i32", "values": "*fp32", "places": "*i32"}
    types |= {**dict.fromkeys(("next_values", "margins"), "*fp32"), "head_ids": "*i32"}
    for named in (False, True):
        choice = {"BLOCK": CHOICE_BLOCK, "NOISY": True, "MARGIN": True, "NAMED": named}
        yield f"choice, named {named}", choose._block_argmax_kernel, types, choice, 4, 1
    convolution = {"KERNEL_SIZE": 2, "BLOCK": block_convolution.MAX_BLOCK, "ADD": True}
    yield "convolution", block_convolution._block_convolution_kernel, {}, convolution, 4, 1
    yield from choice_of_candidates(types, most)
    yield from choice_by_the_id_before(types, most)
    delta = {"K_HEADS": 16, "V_HEADS": 32, "K_DIM": 128, "V_DIM": 128}
    wide = dict.fromkeys(("state", "queries", "keys", "values", "gates", "out"), "*fp32")
    counts = {"cycle": "*i32", "kept": "*i32"}
    block = {**delta, "BLOCK_D": 128, "BLOCK_V": delta_step.BLOCK_V}
    yield "recurrence", delta_step._block_kernel, {**wide, **counts}, block, 1, 1
    norm, types = {"V_HEADS": 32, "V_DIM": 128, "BLOCK_D": 128, "TURNS": 1}, {"out": "*fp32", "to": BF16, "eps": "fp32"}
    for rows in (1, 1000):
        together, warps = rows_of_program(rows, 128)
        yield "gated norm", delta_step._gated_norm_kernel, types, {**norm, "ROWS": together}, warps, 1
    small = {**dict.fromkeys(("rate", "bias"), "*fp32"), **wide, **counts}
    inputs = {**delta, "BLOCK_D": 128, "BLOCK_HEADS": 32, "CONV_KERNEL": 4, "EPS": 1e-6}
    yield "inputs", delta_step._inputs_kernel, small, inputs, 1, 1


def choice_of_candidates(types: dict[str, str], most: int | None) -> Iterator[Work]:
    """Of the most that are taken out, and of Qwen3.8-27B's drafter."""
    for top_k, blocks in ((MOST_CANDIDATES, 122), (16, 122))[:most]:
        sizes = {"WIDE": top_k, "TILE": min(256, candidate_walk.TILE // top_k), "NOISY": True}
        floats = dict.fromkeys(("multiplier", "cap"), "fp32") | dict.fromkeys(("scores", "followers"), "*fp32")
        kinds = {**types, **floats, "ids": "*i32", "anchor": "*i64", "rows": "i32", "out": "*i64"}
        block = {"BLOCK": CHOICE_BLOCK, "WIDE": top_k, "NAMED": True}
        yield "candidates of a block", candidate_walk._block_candidates_kernel, kinds, block, 4, 1
        every = {**sizes, "ALL": power_of_two(blocks * top_k), "CAPPED": True}
        yield "candidates", candidate_walk._candidates_kernel, kinds, every, 8, 1
        yield "walk", candidate_walk._walk_kernel, kinds, {**sizes, "MARGIN": True}, 8, 1


def choice_by_the_id_before(types: dict[str, str], most: int | None) -> Iterator[Work]:
    """Of a wide rank that is read piece by piece, and of the published one in each dtype."""
    for kind, size, rank in ((BF16, 2, 600), (BF16, 2, 256), ("*fp32", 4, 256))[:most]:
        tile = min(power_of_two(rank), markov_walk.TILE_BYTES // size)
        kinds = {**types, **dict.fromkeys(("logits", "previous", "following"), kind), "anchor": "*i64", "out": "*i64"}
        sizes = {"RANK": rank, "BLOCK": MARKOV_BLOCK, "TILE": tile, "NOISY": True, "MARGIN": True}
        for named in (False, True):
            name, work = f"row {kind} {rank}, named {named}", {**sizes, "NAMED": named}
            yield name, markov_walk._block_row_kernel, {**kinds, "row": "i32"}, work, 8, 1
    blocks = {"BLOCKS": power_of_two(-(-151_936 // MARKOV_BLOCK)), "NOT_FINITE_ID": 0, "MARGIN": True}
    yield "best of many blocks", choose._argmax_kernel, {**types, "out": "*i64"}, blocks, 8, 1


def packed_weights(most: int | None) -> Iterator[Work]:
    """Decoded for prompts, and multiplied where the few-row kernels cannot: by two formats if not by all."""
    for weight, scales in (
        (int4(16, 128, 32, True), BF16),
        (int8(16, 128, 128, scales=torch.float32), "*fp32"),
        (fp8(16, 128, scales=torch.bfloat16), BF16),
        (nvfp4(16, 128), "*u8"),
        (gguf("Q5_1", 16, 128), "*fp16"),
        (gguf("Q4_K", 16, 256), "*u8"),
        (gguf("Q6_K", 16, 256), "*i8"),
        (gguf("IQ4_XS", 16, 256), "*i8"),
    ):
        packed = FragmentWeight.of(weight)
        zeros = "*fp16" if packed.format.minima and not packed.format.nested else "*u8"
        row_scales = "*fp16" if packed.format.nested else "*fp32"
        types = {"codes": "*i32", "scales": scales, "zeros": zeros, "row_scales": row_scales, "taken": "*i32"}
        constants = fragment_decode.tile_constants(packed.format)
        config, name = fragment_decode.CONFIG, packed.format.codes
        launch = {**constants, **fragment_decode.launch_constants(packed.coded_rows, packed.shape[1], config)}
        launch["MATRIX_TILES"] = 1
        for codes in ("*i32", EIGHT) if name == "e4m3" else ("*i32",):
            read = {**types, "codes": codes}
            yield f"decode {name} {codes}", fragment_decode._decode_kernel, read, launch, config.num_warps, 1
        if most is not None and name not in ("e2m1", "int6"):
            continue
        if packed.format.of_gguf:
            rows_of = {**constants, "RUNS": config.steps * fragment_decode.STEP_RUNS}
            ids = {**types, "ids": "*i64"}
            yield f"decoded rows {name}", fragment_decode._gather_kernel, ids, rows_of, config.num_warps, 1
        rows = {"BLOCK_M": 16, "ADD": True}
        yield f"decoded product {name}", decode_gemm._linear_kernel, types, {**constants, **rows}, 4, 2


def attention(shape: tuple[int, int, int], limit: int, ways: int) -> Iterator[Work]:
    """Over caches of each kind, in so many ways."""
    heads, kv_heads, head_dim = shape
    sizes = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "head_dim": head_dim, "BLOCK_D": head_dim}
    mask = {"CAUSAL": True, "SLIDING_WINDOW": 0, "CONTEXT_WINDOW": 0}
    for kind, per_doubling in ((BF16, 0), ("*i8", SPLITS_PER_DOUBLING), ("*i8", 0))[:ways]:
        config = split_kv.decode_config(16 * heads // kv_heads, head_dim, 2 if kind == BF16 else 1, limit)
        splits = {"SPLITS_PER_DOUBLING": per_doubling, "BLOCK_M": config.block_m, "BLOCK_KV": config.block_kv}
        splits |= {"RING": kind != BF16, "CODED": kind != BF16}
        scales = dict.fromkeys(("key_scales", "value_scales"), "*fp32")
        types = {"start": "*i32", "scale": "fp32", "keys": kind, "values": kind, **scales}
        kernel, constants = decode_attention._attend_split_kernel, {**sizes, **splits, **mask}
        yield f"attend {kind} {per_doubling}", kernel, types, constants, config.num_warps, config.num_stages
        config = split_kv.decode_config(4096, head_dim, 2 if kind == BF16 else 1, limit, split_kv.PREFILL_CONFIGS)
        tile = {"BLOCK_M": config.block_m, "BLOCK_KV": config.block_kv, "SLIDING_WINDOW": 0, "RING": False}
        tile |= {"CODED": kind != BF16, "GATED": head_dim == 256, "SINKS": head_dim == 64}
        types |= {"gates": BF16, "sinks": "*fp32"}
        kernel, constants = prefill_attention._attend_prompt_kernel, {**sizes, **tile}
        yield f"attend a prompt {kind}", kernel, types, constants, config.num_warps, config.num_stages
    combine = {"SPLITS_PER_DOUBLING": SPLITS_PER_DOUBLING, "BLOCK_KV": 32}
    combine |= {"BLOCK_SPLITS": decode_attention.BLOCK_SPLITS, "GATED": True, "SINKS": head_dim == 64}
    del mask["CAUSAL"], sizes["NUM_KV_HEADS"]
    types = {"start": "*i32", "gates": BF16, "sinks": "*fp32"}
    yield "combine", decode_attention._combine_splits_kernel, types, {**sizes, **combine, **mask}, 4, 3


def chunks(wide: bool) -> Iterator[Work]:
    """A prompt's rows of Gated-DeltaNet. ``wide``: in float32, too, which is slow to compile and far from any limit."""
    sizes = {"K_HEADS": 16, "V_HEADS": 32, "K_DIM": 128, "V_DIM": 128}
    names = ("rate", "bias", "scales", "gates", "lower", "solved", "scores", "factors", "state", "out")
    for kind, dtype in ((BF16, torch.bfloat16), ("*fp32", torch.float32))[: 2 if wide else 1]:
        config = delta_chunk.CONFIGS[dtype]
        types = dict.fromkeys(names, "*fp32") | dict.fromkeys(("projected", "conv", "conv_state", "mixed"), kind)
        shape = {"BLOCK_D": 128, "BLOCK_HEADS": 32, "CONV_KERNEL": 4, "EPS": 1e-6, "ROWS": delta_rows.ROWS}
        yield f"rows {kind}", delta_rows._rows_kernel, types, {**sizes, **shape}, 4, 3
        chunk = {**sizes, "CHUNK": delta_chunk.CHUNK, "PRECISION": config.precision}
        yield f"chunks' scores {kind}", delta_chunk._scores_kernel, types, chunk, 8, 3
        scan = {**chunk, "BLOCK_V": config.block_v}
        yield f"scan {kind}", delta_chunk._scan_kernel, types, scan, config.num_warps, config.num_stages
    triangle = {"V_HEADS": 32, "CHUNK": delta_chunk.CHUNK, "BLOCK": delta_chunk.BLOCK}
    yield "solve", delta_chunk._solve_kernel, dict.fromkeys(names, "*fp32"), triangle, 1, 3


POINTERS = {
    *("queries", "keys", "values", "partial_outputs", "softmax_stats", "sums", "scales", "x", "weight", "out"),
    *("residual", "gate_up", "qkv", "bias", "query_norm", "key_norm", "cos", "sin", "logits", "projected", "conv"),
    *("conv_state", "inputs", "base", "own", "successors", "predecessors"),
}


SIZES = ("rows", "out_features", "in_features", "intermediate_size", "gate_stride", "features")  # multiples of 16


def compiled(card: int, item: Work) -> dict[str, Any]:
    """What one kernel takes on one card."""
    target = GPUTarget("cuda", card, 32)

    def current_target() -> GPUTarget:
        return target

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
    target_info.current_target = current_target  # kernels ask for the card's capability while they are compiled
    name, kernel, types, constants, warps, stages = item
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        else:
            pointer = "*fp32" if argument in ("partial_outputs", "softmax_stats", "sums", "scales") else BF16
            signature[argument] = types.get(argument, pointer if argument in POINTERS else "i32")
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    values = {places[name]: value for name, value in constants.items()}
    # As at run time: tensors and their rows begin at multiples of 16 bytes, so that loads go through shared memory in
    # stages.
    even = [name for name, kind in signature.items() if kind.startswith("*") or (name in SIZES and kind == "i32")]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=target, options=options)
    return {"card": card, "kernel": name, "shared": built.metadata.shared}


if __name__ == "__main__":
    kernels, cards = sys.argv[1], list(map(int, sys.argv[2:])) or list(LIMITS)
    every = ((card, item) for card in cards for item in work(LIMITS[card], kernels))
    fit = [(card, item) for card, item in every if card >= READS_EIGHT or EIGHT not in item[2].values()]
    json.dump([compiled(card, item) for card, item in fit], sys.stdout)
