"""Eight-bit drafters. On one CUDA GPU, microseconds of every way to multiply with an eight-bit weight against bf16:

``PYTHONPATH=. python benchmarks/int8_gemm.py --out FILE.json``

and on any machine, what each drafter precision does to the acceptance of the bundled pairs:

``PYTHONPATH=. python benchmarks/int8_gemm.py --acceptance --out FILE.json``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_local.bench import trial
from dflash_local.bench.prompts import held_out
from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog import bundled
from dflash_local.engine.drafter_precision import apply, precision_of
from dflash_local.engine.load import load
from dflash_local.engine.session import Session
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.kernels import int8_gemm
from dflash_local.kernels.int8_gemm import Int8Config, Int8Weight
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.kernels.timing import replay_ms
from dflash_local.load_config import DRAFTER_PRECISIONS, LoadConfig
from dflash_local.models.fused.formats import INT8_CONFIGS, INT8_SWIGLU_CONFIGS, LIBRARY, KernelConfig
from dflash_local.models.fused.linear import GateUp, Linear
from dflash_local.request import Limits, Request, SamplingParams

# out_features, in_features, and how many different weights are multiplied in turn, so that none is in a cache.
SHAPES = (
    ("head", Linear, 248_320, 4096, 1),
    ("gate and up", GateUp, 12_288, 4096, 5),
    ("down", Linear, 4096, 12_288, 10),
    ("output", Linear, 4096, 4096, 30),
    ("qkv", Linear, 6144, 4096, 20),
)
BF16_CONFIGS: dict[type, tuple[GemmConfig, ...]] = {
    Linear: (GemmConfig(32, 128, 4), GemmConfig(32, 128, 7), GemmConfig(32, 256, 5)),
    GateUp: (GemmConfig(32, 128, 4),),
}
# Beside those that are chosen from at load.
MORE: dict[type, tuple[Int8Config, ...]] = {
    Linear: (
        *(
            Int8Config(gemm)
            for gemm in (
                GemmConfig(128, 128, 6, 8),
                GemmConfig(128, 256, 4, 8),
                GemmConfig(64, 256, 6, 8),
                GemmConfig(32, 512, 4),
            )
        ),
        *(Int8Config(gemm, split_k=4) for gemm in (GemmConfig(64, 256, 4), GemmConfig(128, 128, 5))),
        *(
            Int8Config(gemm, True)
            for gemm in (
                GemmConfig(64, 128, 8),
                GemmConfig(64, 512, 4),
                GemmConfig(256, 128, 4, 8),
                GemmConfig(32, 512, 5),
            )
        ),
        Int8Config(GemmConfig(128, 256, 4), True, 4),
    ),
    GateUp: (
        *(Int8Config(gemm) for gemm in (GemmConfig(64, 128, 5, 8), GemmConfig(64, 256, 3, 8))),
        *(
            Int8Config(gemm, True)
            for gemm in (GemmConfig(32, 512, 4), GemmConfig(64, 256, 5, 8), GemmConfig(128, 128, 5, 8))
        ),
    ),
}
REPLAYS = 11
PROMPTS = 12
TEMPERATURE, SEEDS = 2.0, (1, 2, 3)  # where many of the toys' drafts are rejected
HELD_OUT = bundled.FOLDER / "heldout.json"
W8A8 = Int8Config(GemmConfig(), w8a8=True)


def layers_of(kind: type, out_features: int, in_features: int, copies: int) -> Iterator[Linear | GateUp]:
    """Random weights of one shape on the GPU."""
    for seed in range(copies):
        generator = torch.Generator("cuda").manual_seed(seed)
        weight = torch.empty(
            out_features * (2 if kind is GateUp else 1), in_features, device="cuda", dtype=torch.bfloat16
        )
        yield kind(weight.normal_(generator=generator).mul_(in_features**-0.5))


def microseconds(
    layers: Sequence[Linear | GateUp], config: KernelConfig | None, x: torch.Tensor, out: torch.Tensor
) -> float:
    """Of one product, the mean over all weights; the median of so many replays."""
    for layer in layers:
        layer.config = config
    return 1000 * replay_ms(lambda: [layer(x, out) for layer in layers], REPLAYS) / len(layers)


def error_of(layer: Linear | GateUp, config: Int8Config, x: torch.Tensor, out: torch.Tensor) -> float:
    """The largest difference between a kernel and its reference, by the largest number of the reference's."""
    layer.config = config
    reference = int8_gemm.swiglu_reference if isinstance(layer, GateUp) else int8_gemm.linear_reference
    assert isinstance(layer.weight, Int8Weight)
    wanted = reference(x.float(), layer.weight, out.float(), config)
    return float((layer(x, out).float() - wanted).abs().max() / wanted.abs().max())


def products(rows: int, limit_s: float) -> dict[str, Any]:
    """Every shape with every configuration; what the time does not suffice for is left out and said."""
    began = time.perf_counter()
    found: dict[str, Any] = {}
    for name, kind, out_features, in_features, copies in SHAPES:
        layers = list(layers_of(kind, out_features, in_features, copies))
        weight = layers[0].weight
        x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, out_features, device="cuda", dtype=torch.bfloat16)
        times: dict[str, float] = {"bf16, library": microseconds(layers, LIBRARY, x, out)}
        for gemm in BF16_CONFIGS[kind]:
            times[f"bf16, {shown(gemm)}"] = microseconds(layers, gemm, x, out)
        layers = [kind(Int8Weight.of(layer.weight)) for layer in layers if isinstance(layer.weight, torch.Tensor)]
        errors: dict[str, float] = {}
        left_out: dict[str, str] = {}
        for config in (*(INT8_CONFIGS if kind is Linear else INT8_SWIGLU_CONFIGS), *MORE[kind]):
            text = f"{'8-bit rows' if config.w8a8 else 'bf16 rows'}, {shown(config.gemm)}, split {config.split_k}"
            late = time.perf_counter() - began > limit_s
            if late or not config.fits(out_features, in_features):
                left_out[text] = "no time was left" if late else "does not divide the weight"
                continue
            try:
                errors[text] = error_of(layers[0], config, x, out)
                times[text] = microseconds(layers, config, x, out)
            except Exception as error:  # a configuration that this card has no room for
                left_out[text] = str(error).strip().partition("\n")[0]
        size = {"shape": [out_features, in_features], "bf16_bytes": weight.nbytes}
        entry = {**size, "us": times, "error": errors, "left_out": left_out}
        found[name] = entry
        show(name, entry)
    return found


def shown(gemm: GemmConfig) -> str:
    """A configuration in a few letters."""
    return f"{gemm.block_n} x {gemm.block_k}, {gemm.num_stages} stages, {gemm.num_warps} warps"


def show(name: str, entry: dict[str, Any]) -> None:
    """The fastest first."""
    full = min(time for way, time in entry["us"].items() if way.startswith("bf16,"))
    print(f"{name} {entry['shape'][0]} x {entry['shape'][1]}: bf16 at best {full:.1f} us")
    for way, time_us in sorted(entry["us"].items(), key=lambda item: item[1]):
        size = entry["bf16_bytes"] / (1 if way.startswith("bf16,") else 2)
        error = entry["error"].get(way)
        wrong = "" if error is None else f"  error {error:.1e}"
        print(f"  {time_us:8.1f} us  {time_us / full:5.2f}  {size / time_us / 1e6:5.2f} TB/s  {way}{wrong}")
    for way, why in entry["left_out"].items():
        print(f"  left out: {way}: {why}")


def acceptance(prompts: int) -> dict[str, Any]:
    """Acceptance of the bundled pairs over held-out prompts for each precision, and for drafters damaged on purpose.

    The toys' greedy drafts are nearly all accepted, so that a small loss could not be seen there: ``least_cycles``
    is what no drafter can go below. At temperature 2 many are rejected. The controls show that figures can move.
    """
    found: dict[str, Any] = {}
    for name in bundled.BUNDLED:
        session = fresh(name)
        alone = [reply.ids for reply in replies_of(session, prompts, "ar")]
        found[name] = {}
        for word, change in PRECISIONS.items():
            session = fresh(name)
            try:
                change(session.runner.proposer)
            except UsageError as error:
                found[name][word] = {"refused": str(error)}
            else:
                found[name][word] = accepted(session, prompts, alone)
            print(f"{name}, {word}: {found[name][word]}", flush=True)
    return found


def fresh(name: str) -> Session:
    """A bundled pair as it is stored."""
    return load(bundled.find(name), LoadConfig(device="cpu", dtype="float32", engine="fused"))


def worn(word: str) -> Callable[[Any], None]:
    """What gives a drafter the drafter precision of that name."""

    def change(drafter: Any) -> None:
        precision = precision_of(word, drafter.target.vocab_size)
        assert precision is not None
        apply(drafter, precision)

    return change


def w8a8(drafter: Any) -> None:
    """Eight bits for the activations as well."""
    worn("8bit")(drafter)
    for product in drafter.products:
        product.config = W8A8


def damaged(step: int) -> Callable[[Any], None]:
    """A control: only every so many codes are used."""

    def change(drafter: Any) -> None:
        worn("8bit")(drafter)
        for matrix in drafter.matrices:
            weight = matrix.weight
            codes = (weight.codes.float() / step).round().mul(step).clamp(-int8_gemm.MAX_CODE, int8_gemm.MAX_CODE)
            matrix.weight = Int8Weight(codes.to(torch.int8), weight.scales, weight.dtype)

    return change


PRECISIONS: dict[str, Callable[[Any], None]] = {word: worn(word) for word in DRAFTER_PRECISIONS}
PRECISIONS |= {"8bit, activations too": w8a8}
PRECISIONS |= {f"control: every {step}th code": damaged(step) for step in (32, 64)}


def replies_of(session: Session, prompts: int, mode: Mode, *sampled: SamplingParams) -> list[trial.Written]:
    """The replies to the first held-out prompts, greedy ones or once for each way of sampling."""
    ids = [trial.prompt_ids(session, prompt, False) for prompt in held_out(HELD_OUT)[:prompts]]
    return [
        trial.write(session, Request(prompt_ids=one, limits=Limits(256), mode=mode, sampling=sampling))
        for sampling in sampled or (SamplingParams(),)
        for one in ids
    ]


def accepted(session: Session, prompts: int, alone: list[tuple[int, ...]]) -> dict[str, Any]:
    """Figures of one drafter precision; ``alone`` are the target's own greedy replies."""
    greedy = replies_of(session, prompts, "dflash")
    sampled = replies_of(
        session, prompts, "dflash", *(SamplingParams(temperature=TEMPERATURE, seed=seed) for seed in SEEDS)
    )
    entry: dict[str, Any] = {}
    for name, replies in (("greedy", greedy), (f"temperature {TEMPERATURE:g}", sampled)):
        cycles = [cycle for reply in replies for cycle in reply.cycles]
        entry[name] = {
            "mean_acceptance_length": sum(cycle.emitted for cycle in cycles) / len(cycles),
            "cycles": len(cycles),
            "least_cycles": sum(-(-(len(reply.ids) - 1) // session.facts.block_size) for reply in replies),
        }
    entry["greedy"]["equal_to_the_targets_own"] = sum(
        reply.ids == ids for reply, ids in zip(greedy, alone, strict=True)
    )
    # Equal for all sides: the noise is the same, whoever drafted.
    entry[f"temperature {TEMPERATURE:g}"]["replies"] = hashlib.sha256(
        repr([reply.ids for reply in sampled]).encode()
    ).hexdigest()[:16]
    entry["drafter_matrix_bytes"] = sum(matrix.weight.nbytes for matrix in session.runner.proposer.matrices)
    return entry


@torch.inference_mode()
def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="held-out prompts of each pair")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=50, help="after which no further configuration is begun")
    parser.add_argument("--out", type=Path)
    wish = parser.parse_args()
    if wish.acceptance:
        what = "acceptance of the bundled toy pairs by drafter precision, fused engine, float32, CPU, held-out prompts"
        result: dict[str, Any] = {"what": what, "prompts": wish.prompts, "pairs": acceptance(wish.prompts)}
    else:
        what = "products with random weights, microseconds, medians of CUDA graph replays over different weights"
        result = {"what": what, "rows": wish.rows, "shapes": products(wish.rows, wish.seconds)}
    result |= {"machine": machine(), "versions": versions()}
    if wish.out is not None:
        wish.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
