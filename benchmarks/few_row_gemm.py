"""Products of a few rows with quantised weights on one CUDA GPU: whether they are right, and their microseconds
beside the bfloat16 product's.

``PYTHONPATH=. python benchmarks/few_row_gemm.py --out FILE.json``
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dflash_local.bench.provenance import machine, versions
from dflash_local.config.quantization import SUPER_BLOCK
from dflash_local.kernels import cuda_driver, few_row_gemm, nvrtc, skinny_gemm
from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentFormat, FragmentWeight
from dflash_local.kernels.random_weight import random_coded
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import span_ms
from dflash_local.models.fused.formats import GEMM_CONFIGS, SWIGLU_CONFIGS

ROWS = (1, 4, 8, 16)
COLD_BYTES = 400_000_000  # of weights that are multiplied in turn, so that none is in a cache
REPLAYS, LAUNCHES = 9, 60  # at least so many launches of a graph
ROUNDING = 3e-3  # of results to bfloat16, as their root mean square over that of the results: 1.7e-3; gated: 2.9e-3
GATED_ROUNDING = 5e-3


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
# With one more group of columns.
RAGGED = (Shape(1000, 4096), Shape(1056, 1024, paired=True), Shape(1064, 1024, residual=True, tail=40))


BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = {
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
# The same formats as humming-kernels names them; its products neither gate nor add.
HUMMING: dict[str, dict[str, Any]] = {
    "int4 g128": {"dtype": "int4", "group_size": 128},
    "int4 g32": {"dtype": "int4", "group_size": 32},
    "int4 g32 zeros": {"dtype": "uint4", "group_size": 32, "has_zero_point": True},
    "int8 rows": {"dtype": "int8"},
    "fp8": {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
    "fp8 rows": {"dtype": "float8e4m3"},
    "MXFP4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
}
MORE = tuple(  # beside those that are chosen from at load
    FewRowConfig(*layout, num_stages=stages, blocks_per_sm=blocks)
    for layout, stages, blocks in (
        ((16, 1, 2), 3, 1), ((8, 2, 1), 3, 1), ((8, 2, 1), 4, 1), ((4, 4, 1), 4, 1), ((8, 1, 2), 2, 2),
        ((8, 1, 1), 3, 2), ((10, 2, 1), 2, 1), ((10, 2, 1), 3, 1), ((8, 2, 1), 2, 1),
    )
)  # fmt: skip


def random_weight(name: str, shape: Shape) -> Codable:
    """Random codes and scales of a format."""
    form, k = FORMATS[name], shape.in_features
    if shape in RAGGED:
        k += SUPER_BLOCK if form.nested else max(form.block[1], 32) if form.grouped and form.block else 32
    return random_coded(form, (shape.out_features - shape.tail, k), torch.Generator("cuda").manual_seed(0))


def packed_weight(shape: Shape, weight: Codable) -> FragmentWeight:
    """With the tail of its shape."""
    packed, k = FragmentWeight.of(weight), weight.shape[1]
    return packed.with_tail(torch.randn(shape.tail, k, device="cuda").bfloat16() / k**0.5) if shape.tail else packed


def inputs(rows: int, in_features: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Activations that show different faults."""
    generator = torch.Generator("cuda").manual_seed(rows)
    gaussian = torch.randn(rows, in_features, device="cuda", generator=generator).bfloat16()
    one_hot = torch.zeros_like(gaussian)
    one_hot[torch.arange(rows), torch.randint(0, in_features, (rows,), device="cuda", generator=generator).cpu()] = 1
    one_hot[-1] = 0
    one_hot[-1, -1] = 1
    outliers = gaussian.clone()
    outliers[:, 7] *= 1000  # a channel
    outliers[0] *= 300  # a row
    yield from (
        ("one-hot", one_hot),
        ("gaussian", gaussian),
        ("outliers", outliers),
        ("zero", torch.zeros_like(gaussian)),
    )


def product(
    shape: Shape, x: torch.Tensor, weight: FragmentWeight, config: FewRowConfig, residual: torch.Tensor | None
) -> torch.Tensor:
    """By the kernel, to memory that shows what is not written."""
    width = shape.out_features // 2 if shape.paired else shape.out_features
    out = torch.full((len(x), width), float("nan"), device="cuda", dtype=torch.bfloat16)
    if shape.paired:
        return few_row_gemm.swiglu(x, weight, out, config)
    return few_row_gemm.linear(x, weight, out, config, residual)


def faults(shape: Shape, name: str, rows_list: Sequence[int]) -> dict[str, Any]:
    """What is wrong with the configurations of a format and a shape, and the largest errors seen."""
    weight = random_weight(name, shape)
    packed = packed_weight(shape, weight)
    wide = torch.cat((weight.dequantized(), packed.tail_rows().float())).double()
    wrong: list[str] = []
    if not torch.equal(packed.unpacked().dequantized(), weight.dequantized()):
        wrong.append("packing")
    errors: dict[str, float] = {}
    for rows in rows_list:
        residual = torch.randn(rows, shape.out_features, device="cuda").bfloat16() if shape.residual else None
        for kind, x in inputs(rows, weight.shape[1]):
            sums = x.double() @ wide.t()
            for config in few_row_gemm.candidates(packed, shape.paired, rows, shared_memory()):
                got = product(shape, x, packed, config, None)
                again = product(shape, x, packed, config, None)
                what = f"{kind}, {rows} rows, {config}"
                if not torch.equal(got, again):
                    wrong.append(f"other bits the second time: {what}")
                if shape.paired:
                    gate, up = sums.bfloat16().chunk(2, -1)
                    want = (F.silu(gate) * up).double()
                else:
                    want = sums.double()
                    if kind in ("one-hot", "zero") and not torch.equal(got, sums.bfloat16()):
                        wrong.append(f"not exact: {what}")
                if residual is not None and not torch.equal(
                    product(shape, x, packed, config, residual), (got.float() + residual.float()).bfloat16()
                ):
                    wrong.append(f"residual: {what}")
                if kind == "zero":
                    continue
                per_row = (got.double() - want).norm(dim=1) / want.norm(dim=1)
                error = float(per_row.max())
                errors[kind] = max(errors.get(kind, 0.0), error)
                if not error <= (GATED_ROUNDING if shape.paired else ROUNDING):
                    wrong.append(f"error {error:.1e}: {what}")
    wrong += dependent_rows(shape, packed)
    return {"wrong": wrong, "errors": errors}


def dependent_rows(shape: Shape, packed: FragmentWeight) -> list[str]:
    """Configurations with which a row's bits depend on the other rows, its place or their number."""
    wrong = []
    x = torch.randn(16, packed.shape[1], device="cuda").bfloat16()
    strangers = torch.randn_like(x) * 30
    for config in few_row_gemm.candidates(packed, shape.paired, 16, shared_memory()):
        want = product(shape, x, packed, config, None)
        for place in (0, 3, 8, 15):
            mixed = strangers.clone()
            mixed[place] = x[5]
            if not torch.equal(product(shape, mixed, packed, config, None)[place], want[5]):
                wrong.append(f"row {place} depends on other rows: {config}")
        if not torch.equal(product(shape, x[5:6], packed, config, None)[0], want[5]):
            wrong.append(f"a row alone has other bits: {config}")
        if not torch.equal(product(shape, x.repeat(3, 1)[:41], packed, config, None)[37], want[5]):
            wrong.append(f"a row of 41 has other bits: {config}")
    return wrong


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
        few_rows = few_row_gemm.swiglu if shape.paired else few_row_gemm.linear
        for config in few_row_gemm.candidates(FragmentWeight.plain(first), shape.paired, rows, shared_memory()):
            calls = [partial(few_rows, x, FragmentWeight.plain(copy), out, config) for copy in copies]
            times.append(microseconds(calls))
        found[rows] = min(times)
    return found


def kernel_times(shape: Shape, name: str, rows_list: Sequence[int], more: bool) -> dict[int, dict[str, float]]:
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
        for config in configs(first, shape.paired, rows, more):
            if shape.paired:
                calls = [partial(few_row_gemm.swiglu, x, copy, out, config) for copy in copies]
            else:
                calls = [partial(few_row_gemm.linear, x, copy, out, config, residual) for copy in copies]
            times[shown(config)] = microseconds(calls)
        found[rows] = dict(sorted(times.items(), key=lambda item: item[1]))
    return found


def humming_times(shape: Shape, name: str, rows_list: Sequence[int]) -> dict[int, float]:
    """Microseconds of the library's product by rows, over copies like ours; its kernels compile at their first use."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    n, k = shape.out_features, shape.in_features
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    copies = math.ceil(COLD_BYTES / FragmentWeight.of(random_weight(name, shape)).nbytes)
    layers = []
    for _ in range(copies):
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(HUMMING[name]), torch_dtype=torch.bfloat16).cuda()
        layer.load_from_unquantized(weight)
        layer.transform()
        layers.append(layer)
    found = {}
    for rows in rows_list:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        found[rows] = microseconds([partial(layer, x, outputs=out) for layer in layers])
    return found


def configs(weight: FragmentWeight, paired: bool, rows: int, more: bool) -> list[FewRowConfig]:
    """Those that are chosen from at load, and more of them."""
    usual = few_row_gemm.candidates(weight, paired, rows, shared_memory())
    fitting = [config for config in MORE if more and config.fits(weight, paired, rows, shared_memory())]
    return [*usual, *(config for config in fitting if config not in usual)]


def shown(config: FewRowConfig) -> str:
    """A configuration in a few letters."""
    size = f"{config.warps_k}x{config.warps_n}x{config.tiles}, {config.num_stages} stages"
    return f"{size}, split {config.split_k}" + (f", {config.blocks_per_sm} blocks" if config.blocks_per_sm > 1 else "")


def shared_memory() -> int:
    """Bytes for one block."""
    return device_properties(torch.device("cuda", 0)).shared_memory


def _compile(job: tuple[tuple[str, ...], tuple[int, int], int]) -> None:
    options, capability, driver = job
    nvrtc.cubin(few_row_gemm.source_text(few_row_gemm.SOURCE), options, capability, driver)


def compile_ahead(names: Sequence[str], shapes: Sequence[Shape], more: bool) -> int:
    """Every kernel that will run, on all cores; how many they are."""
    capability, driver = torch.cuda.get_device_capability(), cuda_driver.driver_version()
    jobs = {}
    for shape in shapes:
        plain = torch.empty(shape.out_features, shape.in_features, device="cuda", dtype=BF16)
        packed = (packed_weight(shape, random_weight(name, shape)) for name in names)
        for weight in (*packed, FragmentWeight.plain(plain)):
            for rows in (8, 16):
                for config in {*configs(weight, shape.paired, rows, more), *configs(weight, shape.paired, 16, False)}:
                    options = few_row_gemm.compile_options(weight.format, weight.shape[1], config, rows, shape.paired)
                    jobs[tuple(options), capability, driver] = None
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs, chunksize=4))
    return len(jobs)


def _record(checks: dict[str, Any], times: dict[str, Any]) -> dict[str, Any]:
    what = "few-row products with quantised weights: faults found, and microseconds as medians of CUDA graph replays"
    return {"what": what, "checks": checks, "us": times, "machine": machine(), "versions": versions()}


@torch.inference_mode()
def main() -> None:
    """Check, measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--shapes", nargs="+", default=[str(shape) for shape in SHAPES], help="as they are printed")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--more", action="store_true", help="more configurations than are chosen from at load")
    parser.add_argument("--humming", action="store_true", help="humming-kernels beside ours, where it is installed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    known = {str(shape): shape for shape in SHAPES}
    unknown = [shape for shape in args.shapes if shape not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(map(repr, known))}")
    shapes = [known[shape] for shape in args.shapes]
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.perf_counter()
    count = compile_ahead(args.formats, [*shapes, *(() if args.no_check else RAGGED)], args.more)
    print(f"{count} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    checks: dict[str, Any] = {}
    for shape in () if args.no_check else (*RAGGED, *shapes):
        for name in args.formats:
            found = checks[f"{shape} {name}"] = faults(shape, name, args.rows)
            errors = ", ".join(f"{kind} {error:.1e}" for kind, error in found["errors"].items())
            seconds = time.perf_counter() - began
            print(f"{shape} {name}: {errors}; {len(found['wrong'])} wrong; {seconds:.0f} s", flush=True)
            for line in found["wrong"][:6]:
                print("  WRONG", line, flush=True)
    times: dict[str, Any] = {}
    if args.out is not None:
        args.out.write_text(json.dumps(_record(checks, times), indent=2) + "\n", encoding="utf-8")
    for shape in () if args.no_times else shapes:
        bf16 = bf16_times(shape, args.rows)
        times[str(shape)] = {"bf16": bf16}
        print(f"{shape} bf16: " + ", ".join(f"{rows} rows {us:.1f} us" for rows, us in bf16.items()), flush=True)
        for name in args.formats:
            found = times[str(shape)][name] = kernel_times(shape, name, args.rows, args.more)
            for rows, every in found.items():
                best = "; ".join(f"{us:.1f} {config}" for config, us in list(every.items())[:3])
                gain = bf16[rows] / min(every.values())
                print(f"  {name} {rows} rows: x{gain:.2f}: {best}", flush=True)
            if args.humming and name in HUMMING:
                try:
                    library = humming_times(shape, name, args.rows)
                except AssertionError:  # its configurations are for matrices of 128 rows
                    print("    humming does not take this shape", flush=True)
                    continue
                times[str(shape)][f"{name}, humming"] = library
                print(
                    "    humming: " + ", ".join(f"{rows} rows {us:.1f} us" for rows, us in library.items()), flush=True
                )
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(_record(checks, times), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
