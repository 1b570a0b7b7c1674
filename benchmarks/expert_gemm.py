"""The kernels of a mixture of experts on one CUDA GPU: the microseconds of a layer.

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

from benchmarks.fragment_gemm import BF16, FORMATS, microseconds, shared_memory
from dflash_local.bench.provenance import machine, versions
from dflash_local.kernels import expert_gemm
from dflash_local.kernels.expert_gemm import DownConfig, ExpertConfig, GateUpConfig, Mixture
from dflash_local.kernels.experts import ExpertWeight
from dflash_local.kernels.fragment_packing import PLAIN, FragmentWeight
from dflash_local.kernels.random_weight import random_coded

ROWS = (1, 8, 16)
ROUTINGS = 24  # of a graph's launches


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
    kind, experts = FORMATS.get(name, PLAIN), layer.mixture.all_experts
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


def best(
    calls: Callable[[Any], list[Callable[[], None]]], configs: Sequence[ExpertConfig]
) -> tuple[Any, dict[str, float]]:
    """The fastest configuration, and the microseconds of all."""
    times = {config: microseconds(calls(config)) for config in configs}
    fastest = min(times, key=lambda config: times[config])
    return fastest, {str(config): round(us, 2) for config, us in sorted(times.items(), key=lambda item: item[1])}


def layer_times(layer: Layer, up: ExpertWeight, down: ExpertWeight, rows: int, correlated: bool) -> dict[str, Any]:
    """Microseconds of each launch at its best, and of the three."""
    mixture = layer.mixture
    blocks = [Rows(layer, rows, seed, correlated) for seed in range(ROUTINGS)]
    distinct = sum(int(block.list[0]) for block in blocks) / len(blocks)
    of_expert = (up.weight.nbytes + down.weight.nbytes) / mixture.all_experts
    first, first_times = best(
        lambda config: [partial(block.gate_up, up, config) for block in blocks],
        candidates(layer, up, True, rows),
    )
    second, second_times = best(
        lambda config: [partial(block.down, down, config) for block in blocks],
        candidates(layer, down, False, rows),
    )
    whole: list[Callable[[], None]] = []
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


def candidates(layer: Layer, weight: ExpertWeight, gate_up: bool, rows: int) -> list[ExpertConfig]:
    """Find what a load chooses from, compiled on all cores."""
    size = expert_gemm.slice_rows(rows)
    found = list(expert_gemm.candidates(gate_up, weight, layer.mixture, size, shared_memory()))
    specs = [expert_gemm.spec_of(weight, layer.mixture, config, size) for config in found]
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(expert_gemm.compiled, weight.weight.device), specs))
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, print, and keep."""
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
            print(f"{model} {name}; {time.perf_counter() - began:.0f} s", flush=True)
            of_format: dict[str, Any] = {}
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
