"""The kernels of a mixture of experts on one CUDA GPU: whether they are right, and the microseconds of a layer.

    PYTHONPATH=. python benchmarks/expert_gemm.py --out FILE.json

Random weights of true shapes; every launch of a graph has another routing, so that no expert is in a cache. Two
routings: uniform, each row's experts drawn by themselves, the worst case; correlated, as rows of a block were measured
elsewhere: k * rows^0.75 different experts. The byte floor: all bytes of the experts that occur at the card's best read
rate, which ``--floor`` gives in TB/s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_local.bench.provenance import machine, versions
from dflash_local.kernels import cuda_driver, expert_gemm, nvrtc
from dflash_local.kernels.expert_gemm import DownConfig, ExpertConfig, GateUpConfig, Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.few_row_gemm import source_text
from dflash_local.kernels.fragment_packing import PLAIN, FragmentFormat, FragmentWeight
from dflash_local.kernels.random_weight import random_coded
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import span_ms

ROWS = (1, 8, 16)
ROUTINGS = 24  # of a graph's launches
REPLAYS = 7
BF16 = torch.bfloat16
FORMATS: dict[str, FragmentFormat] = {
    "bf16": PLAIN,
    "int4 g128": FragmentFormat("int4", (1, 128), False, BF16),
    "int4 g32 zeros": FragmentFormat("int4", (1, 32), True, BF16),
    "fp8": FragmentFormat("e4m3", (128, 128), False, BF16),
    "MXFP4": FragmentFormat("e2m1", (1, 32), False, torch.uint8),
    "Q4_K": FragmentFormat("int4", (1, 32), False, torch.uint8, minima=True),
    "Q6_K": FragmentFormat("int6", (1, 16), False, torch.int8),
}


class Layer(NamedTuple):
    """A model's expert layer: which, how wide, and the formats that are measured."""

    mixture: Mixture
    hidden: int
    size: int
    formats: tuple[str, ...]
    bias: bool = False


LAYERS = {
    "Qwen3.5-35B-A3B": Layer(
        Mixture(256, 8, 2), 2048, 512, ("bf16", "int4 g128", "fp8", "int4 g32 zeros", "Q4_K", "Q6_K")
    ),
    "Qwen3-Coder-30B-A3B": Layer(Mixture(128, 8), 2048, 768, ("bf16", "int4 g128")),
    "gpt-oss-20b": Layer(Mixture(32, 4, clamp=(7.0, 1.702)), 2880, 2880, ("MXFP4",), bias=True),
}


def matrices(layer: Layer, name: str, features: int, columns: int) -> ExpertWeight:
    """Random ones of all experts."""
    kind, experts = FORMATS[name], layer.mixture.all_experts
    generator = torch.Generator("cuda").manual_seed(features)
    bias = torch.randn(experts, features, device="cuda", generator=generator).bfloat16() if layer.bias else None
    if kind == PLAIN:
        plain = torch.empty(experts * features, columns, device="cuda", dtype=BF16)
        return ExpertWeight(plain.normal_(generator=generator).mul_(columns**-0.5), experts, bias)
    coded = random_coded(kind, (experts * features, columns), generator)
    return ExpertWeight(FragmentWeight.of(coded, in_place=columns % 128 == 0), experts, bias)


def logits(mixture: Mixture, rows: int, seed: int, correlated: bool) -> torch.Tensor:
    """[rows, experts (+ 1)] whose likeliest are drawn by each row, or from the block's few."""
    generator = torch.Generator("cuda").manual_seed(seed)
    found = torch.randn(rows, mixture.experts + (mixture.shared == 2), device="cuda", generator=generator)
    if correlated:
        wanted = min(mixture.experts, round(mixture.top_k * rows**0.75))
        pool = torch.randperm(mixture.experts, device="cuda", generator=generator)[:wanted]
        found[:, pool] += 20
    return found.to(BF16)


class Rows:
    """A block's buffers, and its routing by the kernel."""

    def __init__(self, layer: Layer, rows: int, seed: int, correlated: bool = False) -> None:
        mixture, device = layer.mixture, "cuda"
        self.mixture, self.logits = mixture, logits(mixture, rows, seed, correlated)
        self.x = torch.randn(rows, layer.hidden, device=device).to(BF16)
        self.weights = torch.empty(rows, mixture.slots, device=device)
        self.experts = torch.empty(rows, mixture.slots, device=device, dtype=torch.int32)
        self.list = torch.empty(mixture.list_words, device=device, dtype=torch.int32)
        self.intermediate = torch.empty(rows, mixture.slots, layer.size, device=device, dtype=BF16)
        self.out = torch.empty(rows, layer.hidden, device=device, dtype=BF16)
        self.bias = torch.zeros(mixture.experts, device=device, dtype=BF16) if layer.bias else None
        self.route()

    def route(self) -> None:
        expert_gemm.route(self.logits, self.mixture, self.weights, self.experts, self.list, self.bias)

    def gate_up(self, weight: ExpertWeight, config: GateUpConfig) -> None:
        expert_gemm.gate_up(self.x, weight, self.mixture, self.list, self.intermediate, config)

    def down(self, weight: ExpertWeight, config: DownConfig) -> None:
        routed = self.weights, self.experts, self.list
        expert_gemm.down(self.intermediate, weight, self.mixture, routed, self.out, config)


def plain_rows(weight: ExpertWeight, expert: int) -> torch.Tensor:
    """An expert's matrix in float64."""
    return weight.rows(expert, slice(0, weight.out_features), torch.float32).double()


def faults(layer: Layer, up: ExpertWeight, down: ExpertWeight, rows: int) -> list[str]:
    """What is wrong with any configuration, at one routing."""
    mixture, block, wrong = layer.mixture, Rows(layer, rows, 1), []
    torch.cuda.synchronize()
    probabilities = torch.softmax(block.logits[:, : mixture.experts].float(), -1)
    order = torch.sort(probabilities, descending=True, stable=True, dim=-1)
    if not torch.equal(order.indices[:, : mixture.top_k].int(), block.experts[:, : mixture.top_k]):
        wrong.append("routing")
    used = sorted(set(block.experts.flatten().tolist()))
    if int(block.list[0]) != len(used) or block.list[1 : 1 + len(used)].tolist() != used:
        wrong.append("list of experts")
    want = torch.empty(rows, mixture.slots, layer.size, device="cuda", dtype=torch.float64)
    for expert in used:
        at = block.experts == expert
        products = block.x.double()[at.any(1)] @ plain_rows(up, expert).t()
        if up.bias is not None:
            products += up.bias[expert].double()
        gate, inner = products.chunk(2, -1)
        if mixture.clamp is None:
            want[at] = torch.nn.functional.silu(gate) * inner
        else:
            limit, alpha = mixture.clamp
            gate, inner = gate.clamp(max=limit), inner.clamp(-limit, limit)
            want[at] = (inner + 1) * gate * torch.sigmoid(alpha * gate)
    shared = device_properties(torch.device("cuda", 0)).shared_memory
    size = expert_gemm.slice_rows(rows)

    def differs(got: torch.Tensor, wanted: torch.Tensor, bar: float) -> bool:
        return not float((got.double() - wanted).norm() / wanted.norm()) < bar

    for config in expert_gemm.candidates(True, up, mixture, size, shared):
        block.intermediate.fill_(float("nan"))
        block.gate_up(up, config)  # type: ignore[arg-type]
        if differs(block.intermediate, want, 6e-3):
            wrong.append(str(config))
    block.intermediate.copy_(want)
    results = torch.empty(rows, mixture.slots, layer.hidden, device="cuda", dtype=torch.float64)
    for expert in used:
        at = block.experts == expert
        results[at] = block.intermediate.double()[at] @ plain_rows(down, expert).t()
        if down.bias is not None:
            results[at] += down.bias[expert].double()
    summed = (results * block.weights.double().unsqueeze(2)).sum(1)
    for config in expert_gemm.candidates(False, down, mixture, size, shared):
        block.out.fill_(float("nan"))
        block.down(down, config)  # type: ignore[arg-type]
        if differs(block.out, summed, 6e-3):
            wrong.append(str(config))
    return wrong


def microseconds(calls: Sequence[Callable[[], None]]) -> float:
    """Of one call: the median of replays of a graph of them all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return sorted(span_ms(graph.replay) for _ in range(REPLAYS))[REPLAYS // 2] * 1000 / len(calls)


def best(
    calls: Callable[[Any], list[Callable[[], None]]], configs: Sequence[ExpertConfig]
) -> tuple[Any, dict[str, float]]:
    """The fastest configuration, and the microseconds of all."""
    times = {config: microseconds(calls(config)) for config in configs}
    fastest = min(times, key=lambda config: times[config])
    return fastest, {str(config): round(us, 2) for config, us in sorted(times.items(), key=lambda item: item[1])}


def layer_times(layer: Layer, up: ExpertWeight, down: ExpertWeight, rows: int, correlated: bool) -> dict[str, Any]:
    """Microseconds of each launch at its best, and of the three."""
    mixture, size = layer.mixture, expert_gemm.slice_rows(rows)
    shared = device_properties(torch.device("cuda", 0)).shared_memory
    blocks = [Rows(layer, rows, seed, correlated) for seed in range(ROUTINGS)]
    distinct = sum(int(block.list[0]) for block in blocks) / len(blocks)
    of_expert = (_bytes(up) + _bytes(down)) / mixture.all_experts
    first, first_times = best(
        lambda config: [partial(block.gate_up, up, config) for block in blocks],
        list(expert_gemm.candidates(True, up, mixture, size, shared)),
    )
    second, second_times = best(
        lambda config: [partial(block.down, down, config) for block in blocks],
        list(expert_gemm.candidates(False, down, mixture, size, shared)),
    )
    whole = []
    for block in blocks:
        whole += [block.route, partial(block.gate_up, up, first), partial(block.down, down, second)]
    both = [call for at, call in enumerate(whole) if at % 3]
    return {
        "experts": distinct,
        "bytes": distinct * of_expert,
        "route": microseconds([block.route for block in blocks]),
        "gate_up": first_times,
        "down": second_times,
        "products": 2 * microseconds(both),
        "layer": 3 * microseconds(whole),
    }


def _bytes(weight: ExpertWeight) -> int:
    return weight.weight.nbytes


def compile_ahead(layers: Sequence[tuple[Layer, ExpertWeight, ExpertWeight]]) -> int:
    """All kernels, on all cores."""
    capability, driver = torch.cuda.get_device_capability(), cuda_driver.driver_version()
    shared = device_properties(torch.device("cuda", 0)).shared_memory
    jobs = {}
    for layer, up, down in layers:
        for rows in (8, 16):
            for gate_up, weight in ((True, up), (False, down)):
                source = source_text(expert_gemm.SOURCES["expert_gate_up" if gate_up else "expert_down"])
                for config in expert_gemm.candidates(gate_up, weight, layer.mixture, rows, shared):
                    options = expert_gemm.spec_of(weight, layer.mixture, config, rows).options
                    jobs[source, tuple(options)] = None
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: nvrtc.cubin(job[0], job[1], capability, driver), jobs))
    return len(jobs)


@torch.inference_mode()
def main() -> None:
    """Check, measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--floor", type=float, default=4.35, help="TB/s")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    found: dict[str, Any] = {}
    for model in args.layers:
        layer = LAYERS[model]
        for name in layer.formats:
            up = matrices(layer, name, 2 * layer.size, layer.hidden)
            down = matrices(layer, name, layer.hidden, layer.size)
            count = compile_ahead([(layer, up, down)])
            wrong = [f"{rows} rows: {line}" for rows in args.rows for line in faults(layer, up, down, rows)]
            seconds = time.perf_counter() - began
            print(f"{model} {name}: {count} kernels, {len(wrong)} wrong; {seconds:.0f} s", flush=True)
            for line in wrong[:6]:
                print("  WRONG", line, flush=True)
            of_format: dict[str, Any] = {"wrong": wrong}
            for rows in args.rows:
                for routing in ("uniform", "correlated") if rows > 1 else ("uniform",):
                    at = of_format[f"{rows} rows, {routing}"] = layer_times(
                        layer, up, down, rows, routing == "correlated"
                    )
                    share = at["bytes"] / args.floor / 1e6 / at["products"]
                    (first, us), (second, second_us) = (next(iter(at[key].items())) for key in ("gate_up", "down"))
                    print(
                        f"  {rows} rows, {routing}: {at['experts']:.1f} experts; route {at['route']:.1f}, gate_up "
                        f"{us:.1f} ({first}), down {second_us:.1f} ({second}), both {at['products']:.1f} = "
                        f"{share:.0%} of the floor, layer {at['layer']:.1f} us",
                        flush=True,
                    )
            found[f"{model} {name}"] = of_format
            if args.out is not None:
                record = {"what": "experts of a layer, us", "us": found, "machine": machine(), "versions": versions()}
                args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            del up, down
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
