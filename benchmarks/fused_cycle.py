"""Times of the fused engine with random weights of a pair's true shapes: no download, no disk, one CUDA GPU.

``PYTHONPATH=. python benchmarks/fused_cycle.py "Qwen/Qwen3-8B" --context 1024 --out FILE.json``
Times are medians of CUDA graph replays with the real kernels; what random weights accept says nothing.
Configuration values that no source quotes are taken as stated in ``ASSUMED``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog import registry
from dflash_local.catalog.shapes import shape as known_shape
from dflash_local.engine.fused import FusedRunner, Shape
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels.timing import replay_ms
from dflash_local.models import drafter_weights
from dflash_local.models.drafter_config import DrafterConfig
from dflash_local.models.fused import weights as target_weights
from dflash_local.models.fused.drafter import FusedDrafter
from dflash_local.models.fused.linear import choose_tiles
from dflash_local.models.fused.shape import TargetShape
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.target_facts import TargetFacts
from dflash_local.request import SamplingParams

ASSUMED = {"block_size": 16, "mask_token_id": 7, "rope_theta": 1e7}
REPLAYS = 31


def target_facts(name: str) -> TargetFacts:
    """What a checkpoint of this shape would say of itself."""
    config = known_shape(name)
    if config is None:
        raise SystemExit(f"no shape of {name} is known")
    text = {key: value for key, value in (config.get("text_config") or config).items() if not key.startswith("_")}
    if text["model_type"] == "llama" and not (text.get("rope_parameters") or text.get("rope_scaling") or {}).get(
        "low_freq_factor"
    ):
        text["rope_scaling"] = None
        text["rope_parameters"] = None
        text["rope_theta"] = text.get("rope_theta") or 5e5
    family = {"qwen3_5_text": "qwen3_5", "qwen3_5": "qwen3_5"}.get(text["model_type"], text["model_type"])
    return TargetFacts(
        family=family,
        model_type=text["model_type"],
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        tied=bool(text.get("tie_word_embeddings")),
        wrapped=False,
        prefix="model.",
        text_config=text,
        embedding_rows=text["vocab_size"],
        max_position_embeddings=None,
        quantization=None,
        eos_ids=frozenset(),
    )


def drafter_config(name: str) -> DrafterConfig:
    """A drafter's configuration, its gaps filled by ``ASSUMED``."""
    config = {key: value for key, value in (known_shape(name) or {}).items() if not key.startswith("_")}
    nested = {key: value for key, value in (config.get("dflash_config") or {}).items() if value is not None}
    nested.setdefault("mask_token_id", ASSUMED["mask_token_id"])
    config = {key: value for key, value in config.items() if value is not None} | {"dflash_config": nested}
    for key in ("block_size", "rope_theta"):
        config.setdefault(key, ASSUMED[key])
    return DrafterConfig.from_json(config, Path(name))


def build(target: str, drafter: str, context: int) -> FusedRunner:
    """A runner over random weights on the GPU."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    facts = target_facts(target)
    shape = TargetShape.of(facts, target)
    weights = target_weights.random_weights(facts, shape, device, dtype)
    config = drafter_config(drafter)
    parts = drafter_weights.random_on_device(config, shape.hidden, device, dtype)
    fused = FusedTarget(weights, shape, config.taps, context, config.block_size)
    proposer = FusedDrafter(config, parts, fused)
    choose_tiles([*weights.products, *proposer.products], config.block_size)
    return FusedRunner(fused, proposer, context)


def measure(runner: FusedRunner, length: int, kept: int) -> dict[str, float]:
    """Milliseconds at ``length`` committed tokens; recurrent layers fold ``kept`` rows in each cycle."""
    target, drafter = runner.target, runner.proposer
    block, reach = target.rows, runner._bucket(length + 2 * target.rows)

    def at_length(work: Callable[[], object], rows: int) -> float:
        def again() -> None:
            target.start.fill_(length)
            target.kept.fill_(rows)
            work()

        runner.progress.limit.fill_(2**31 - 1)
        return replay_ms(again, REPLAYS)

    cycle, step = Shape(block, True, True, False, reach), Shape(1, False, False, False, reach)
    return {
        "ar_step_ms": at_length(lambda: runner._cycle(step), 1),
        "cycle_ms": at_length(lambda: runner._cycle(cycle), kept),
        "draft_ms": at_length(lambda: drafter.block(reach), 0),
        "verify_ms": at_length(lambda: target.block(block, reach, True), kept),
        "context_ms": at_length(lambda: drafter.inject(block), 0),
        "head_ms": at_length(lambda: target.weights.head(target.hidden, target.logits), 0),
    }


def prefill_rate(runner: FusedRunner, tokens: int) -> float:
    """Tokens per second, the first token included; the second of two runs."""
    ids = torch.randint(0, runner.target.vocab_size, (tokens,)).tolist()
    sampler = Sampler(SamplingParams(), 1, runner.target.vocab_size, torch.tensor(ids, device="cuda"))
    for _ in range(2):
        runner.restart(0, None)
        runner.begin(sampler, frozenset(), runner.target.rows, True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in runner.prefill(ids, 0):
            pass
        torch.cuda.synchronize()
        span = time.perf_counter() - began
    return tokens / span


@torch.inference_mode()
def main() -> None:
    """Measure one pair and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="committed tokens to measure at")
    parser.add_argument("--kept", type=int, default=6, help="rows that recurrent layers fold in each cycle")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt to time")
    parser.add_argument("--out", type=Path)
    wish = parser.parse_args()
    row = registry.load().find(wish.target)
    if row is None or row.target is None or row.drafter is None:
        raise SystemExit(f"{wish.target} is no pair of the registry")
    runner = build(row.target.id, row.drafter.id, max(*wish.context, wish.prefill) + 64)
    weights = runner.target.weights
    size = sum(p.weight.numel() * p.weight.element_size() for p in weights.products) + weights.head.weight.nbytes
    result: dict[str, Any] = {
        "what": "fused engine, random weights of true shapes, bf16, batch 1, medians of CUDA graph replays",
        "target": row.target.id,
        "drafter": row.drafter.id,
        "block": runner.target.rows,
        "assumed_where_unknown": ASSUMED,
        "target_bytes_per_step": size,
        "kept_rows": wish.kept,
        "tiles": {str(tuple(p.weight.shape)): str(p.tile) for p in weights.products},
        "at": {str(length): measure(runner, length, wish.kept) for length in wish.context},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "machine": machine(),
        "versions": versions(),
    }
    if wish.prefill:
        result["prefill_tokens_per_s"] = {str(wish.prefill): prefill_rate(runner, wish.prefill)}
    for length, times in result["at"].items():
        print(f"{row.target.id} at {length}: " + ", ".join(f"{name} {value:.3f}" for name, value in times.items()))
    print(f"peak {result['peak_gib']:.2f} GiB, prefill {result.get('prefill_tokens_per_s')}")
    if wish.out is not None:
        wish.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
