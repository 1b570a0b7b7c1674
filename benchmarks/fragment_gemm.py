"""Products of a few rows with quantised weights on one CUDA GPU: their microseconds beside the bfloat16 product's.

``PYTHONPATH=. python benchmarks/fragment_gemm.py --out FILE.json``
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_local.bench.provenance import machine, versions
from dflash_local.kernels import fragment_gemm, skinny_gemm
from dflash_local.kernels.fragment_packing import Codable, FragmentFormat, FragmentWeight
from dflash_local.kernels.random_weight import random_coded
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import span_ms
from dflash_local.models.fused.formats import GEMM_CONFIGS, SWIGLU_CONFIGS

ROWS = (1, 4, 8, 16)
COLD_BYTES = 400_000_000  # of weights that are multiplied in turn, so that none is in a cache
REPLAYS, LAUNCHES = 9, 60  # at least so many launches of a graph


@dataclass(frozen=True)
class Shape:
    """A product: its weight [N, K], and whether it is a gated pair or is added to a residual.

    ``tail``: of the N, rows in 16 bits.
    """

    out_features: int
    in_features: int
    paired: bool = False
    residual: bool = False
    tail: int = 0

    def __str__(self) -> str:
        kind = " swiglu" if self.paired else " residual" if self.residual else ""
        kind += f" with {self.tail} rows in 16 bits" if self.tail else ""
        return f"{self.out_features}x{self.in_features}{kind}"


SHAPES = (
    Shape(24576, 4096, paired=True),
    Shape(4096, 12288, residual=True),
    Shape(4096, 4096),
    Shape(12352, 4096),
    Shape(12352, 4096, tail=64),
    Shape(10240, 4096),
    Shape(34816, 5120, paired=True),
    Shape(5120, 17408, residual=True),
    Shape(16480, 5120, tail=96),
    Shape(14336, 5120),
    Shape(5120, 6144, residual=True),
)
BF16, FP32 = torch.bfloat16, torch.float32
FORMATS: dict[str, FragmentFormat] = {
    "int4 g128": FragmentFormat("int4", (1, 128), False, BF16),
    "int4 g128 zeros": FragmentFormat("int4", (1, 128), True, BF16),
    "int4 g64": FragmentFormat("int4", (1, 64), False, BF16),
    "int4 g32": FragmentFormat("int4", (1, 32), False, BF16),
    "int4 g32 zeros": FragmentFormat("int4", (1, 32), True, BF16),
    "int8 rows": FragmentFormat("int8", None, False, FP32),
    "int8 g128": FragmentFormat("int8", (1, 128), False, BF16),
    "int8 g32": FragmentFormat("int8", (1, 32), False, BF16),
    "int8 g32 zeros": FragmentFormat("int8", (1, 32), True, BF16),
    "fp8": FragmentFormat("e4m3", (128, 128), False, BF16),
    "fp8 rows": FragmentFormat("e4m3", None, False, FP32),
    "MXFP4": FragmentFormat("e2m1", (1, 32), False, torch.uint8),
    "NVFP4": FragmentFormat("e2m1", (1, 16), False, torch.float8_e4m3fn, row_scales=True),
    "Q4_1": FragmentFormat("int4", (1, 32), False, torch.float16, minima=True),
    "Q5_0": FragmentFormat("int5", (1, 32), False, torch.float16),
    "Q5_1": FragmentFormat("int5", (1, 32), False, torch.float16, minima=True),
    "Q4_K": FragmentFormat("int4", (1, 32), False, torch.uint8, minima=True),
    "Q5_K": FragmentFormat("int5", (1, 32), False, torch.uint8, minima=True),
    "Q6_K": FragmentFormat("int6", (1, 16), False, torch.int8),
    "IQ4_NL": FragmentFormat("iq4", (1, 32), False, torch.float16),
    "IQ4_XS": FragmentFormat("iq4", (1, 32), False, torch.int8),
}


def random_weight(name: str, shape: Shape) -> Codable:
    """Random codes and scales of a format."""
    size = shape.out_features - shape.tail, shape.in_features
    return random_coded(FORMATS[name], size, torch.Generator("cuda").manual_seed(0))


def packed_weight(shape: Shape, weight: Codable) -> FragmentWeight:
    """With the tail of its shape."""
    packed, k = FragmentWeight.of(weight), weight.shape[1]
    return packed.with_tail(torch.randn(shape.tail, k, device="cuda").bfloat16() / k**0.5) if shape.tail else packed


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, one for each copy of the weight; the median of so many graph replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, math.ceil(LAUNCHES / len(calls)))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    spans = sorted(span_ms(graph.replay) for _ in range(REPLAYS))
    return 1000 * spans[REPLAYS // 2] / (repeats * len(calls))


def bf16_times(shape: Shape, rows_list: Sequence[int]) -> dict[int, float]:
    """The best of this program's bfloat16 products and the library's, by rows."""
    n, k = shape.out_features, shape.in_features
    first = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    copies = [first, *(first.clone() for _ in range(math.ceil(COLD_BYTES / first.nbytes) - 1))]
    found = {}
    for rows in rows_list:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, n // 2 if shape.paired else n, device="cuda", dtype=torch.bfloat16)
        wide = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        times = [] if shape.paired else [microseconds([partial(torch.mm, x, copy.t(), out=wide) for copy in copies])]
        for gemm in SWIGLU_CONFIGS if shape.paired else GEMM_CONFIGS:
            run = skinny_gemm.swiglu if shape.paired else skinny_gemm.linear
            if gemm.fits(n // 2 if shape.paired else n, k):
                times.append(microseconds([partial(run, x, copy, out, gemm) for copy in copies]))
        skinny = fragment_gemm.swiglu if shape.paired else fragment_gemm.linear
        plain = FragmentWeight.plain(first)
        configs = fragment_gemm.candidates(plain, shape.paired, rows, shared_memory())
        fragment_gemm.compile_ahead(plain, shape.paired, rows, configs)
        for config in configs:
            calls = [partial(skinny, x, FragmentWeight.plain(copy), out, config) for copy in copies]
            times.append(microseconds(calls))
        found[rows] = min(times)
    return found


def kernel_times(shape: Shape, name: str, rows_list: Sequence[int]) -> dict[int, dict[str, float]]:
    """Every configuration's microseconds by rows, the fastest first."""
    first = packed_weight(shape, random_weight(name, shape))
    tensors = {each.name: getattr(first, each.name) for each in fields(first)}
    copies = [first]
    for _ in range(math.ceil(COLD_BYTES / first.nbytes) - 1):
        own = {each: value.clone() for each, value in tensors.items() if isinstance(value, torch.Tensor)}
        copies.append(replace(first, **own))
    found: dict[int, dict[str, float]] = {}
    for rows in rows_list:
        x = torch.randn(rows, shape.in_features, device="cuda", dtype=torch.bfloat16)
        width = shape.out_features // 2 if shape.paired else shape.out_features
        out = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
        residual = torch.randn_like(out) if shape.residual else None
        times = {}
        configs = fragment_gemm.candidates(first, shape.paired, rows, shared_memory())
        fragment_gemm.compile_ahead(first, shape.paired, rows, configs)
        for config in configs:
            if shape.paired:
                calls = [partial(fragment_gemm.swiglu, x, copy, out, config) for copy in copies]
            else:
                calls = [partial(fragment_gemm.linear, x, copy, out, config, residual) for copy in copies]
            times[str(config)] = microseconds(calls)
        found[rows] = dict(sorted(times.items(), key=lambda item: item[1]))
    return found


def shared_memory() -> int:
    """Bytes for one block."""
    return device_properties(torch.device("cuda", 0)).shared_memory


@torch.inference_mode()
def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--shapes", nargs="+", default=[str(shape) for shape in SHAPES], help="as they are printed")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if str(shape) in args.shapes]
    began = time.perf_counter()
    times: dict[str, Any] = {}
    for shape in shapes:
        bf16 = bf16_times(shape, args.rows)
        times[str(shape)] = {"bf16": bf16}
        print(f"{shape} bf16: " + ", ".join(f"{rows} rows {us:.1f} us" for rows, us in bf16.items()), flush=True)
        for name in args.formats:
            found = times[str(shape)][name] = kernel_times(shape, name, args.rows)
            for rows, every in found.items():
                best = "; ".join(f"{us:.1f} {config}" for config, us in list(every.items())[:3])
                gain = bf16[rows] / min(every.values())
                print(f"  {name} {rows} rows: x{gain:.2f}: {best}", flush=True)
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
        if args.out is not None:
            what = "few-row products with quantised weights: microseconds as medians of CUDA graph replays"
            record = {"what": what, "us": times, "machine": machine(), "versions": versions()}
            args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
