"""Gated-DeltaNet over a prompt's rows on one CUDA GPU: microseconds of every step, and errors against float64.

``PYTHONPATH=. python benchmarks/delta_prefill.py [--rows 2048 8192] [--chosen-only] [--out FILE.json]``
Inputs are random, layers have the pairs' true shapes; times are medians of CUDA graph replays. The fastest whose
errors suit goes into ``delta_chunk.CONFIGS``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog.shapes import shape as known_shape
from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_chunk, delta_step
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.delta_chunk import CONFIGS, ChunkConfig
from dflash_local.kernels.delta_rows import Rows, heads_of, read_rows
from dflash_local.kernels.delta_step import GatedDeltaState, GatedDeltaWeights
from dflash_local.kernels.gated_delta import chunked
from dflash_local.kernels.timing import replay_ms
from dflash_local.layout.gated_delta_net import GatedDeltaNetLayout

TARGETS = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B")
EPS = 1e-6
REPLAYS = 21
CANDIDATES = (
    *(ChunkConfig(block_v, 4, stages, "bf16x3") for block_v in (16, 32) for stages in (1, 2, 3)),
    *(ChunkConfig(block_v, 8, stages, "bf16x3") for block_v in (32, 64) for stages in (1, 2)),
    ChunkConfig(16, 4, 2, "bf16x2"),
    ChunkConfig(32, 4, 2, "bf16x2"),
    ChunkConfig(64, 8, 2, "bf16x2"),
    ChunkConfig(16, 4, 1, "tf32x3"),
    ChunkConfig(32, 4, 2, "tf32x3"),
    ChunkConfig(32, 8, 1, "tf32x3"),
)


def shape_of(target: str) -> GatedDeltaNetConfig:
    """Of a target's Gated-DeltaNet layers."""
    config = known_shape(target) or {}
    text = config.get("text_config") or config
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return GatedDeltaNetConfig(*(text[f"linear_{name}"] for name in names))


def weights_of(shape: GatedDeltaNetConfig) -> GatedDeltaWeights:
    """Random ones; the heads' decays go from nearly none to half of everything at each row."""
    conv = torch.randn(shape.conv_dim, shape.conv_kernel_size, device="cuda").bfloat16() / 2
    rate = -torch.logspace(-4, 0, shape.num_value_heads, device="cuda")
    return GatedDeltaWeights(conv, rate, torch.zeros(shape.num_value_heads, device="cuda"))


def oracle(
    rows: Rows, state: torch.Tensor, shape: GatedDeltaNetConfig, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state in float64, from the rows as the kernel reads them."""
    q, k, v = (part[:count].transpose(0, 1).double() for part in heads_of(rows, shape))
    g, beta = rows.gates[:count].double().permute(1, 2, 0)
    out, behind = chunked(q, k, v, g, beta, state.transpose(1, 2).double())
    return out.transpose(0, 1), behind.transpose(1, 2)


def apart(found: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found.double() - want).abs().max() / want.abs().max())


class Case:
    """One layer and one prompt."""

    def __init__(self, shape: GatedDeltaNetConfig, count: int) -> None:
        torch.manual_seed(0)
        self.shape, self.count = shape, count
        self.projected = torch.randn(count, shape.projection_size, device="cuda").bfloat16()
        self.layer: Any = SimpleNamespace(
            delta=weights_of(shape), norm=torch.ones(shape.value_head_dim, device="cuda").bfloat16()
        )
        buffers = GatedDeltaNetLayout(shape).state_buffers("layer", 16, "bfloat16")
        *log, _ = Tensors(buffers, torch.device("cuda")).take(buffers)
        self.log = GatedDeltaState(*log)
        self.rows = read_rows(self.projected, self.layer.delta, self.log.conv_state[0], shape)
        self.before = torch.randn_like(self.log.state) / 4
        self.want = oracle(self.rows, self.before, shape, count)

    def errors(self, config: ChunkConfig | None) -> tuple[float, float]:
        """Of outputs and state, computed with one configuration; the reference's without one."""
        state = self.before.clone()
        out = delta_chunk.scan_chunks(
            self.rows, delta_chunk.prepare_chunks(self.rows, self.shape, config), state, self.shape, config
        )
        return apart(out[: self.count], self.want[0]), apart(state, self.want[1])

    def times(self, config: ChunkConfig) -> dict[str, float]:
        """Microseconds of the two steps that a config decides."""
        chunks = delta_chunk.prepare_chunks(self.rows, self.shape, config)
        state = self.before.clone()
        return {
            "cut": 1e3 * replay_ms(lambda: delta_chunk.prepare_chunks(self.rows, self.shape, config), REPLAYS),
            "walk": 1e3
            * replay_ms(lambda: delta_chunk.scan_chunks(self.rows, chunks, state, self.shape, config), REPLAYS),
        }

    def whole(self) -> dict[str, float]:
        """Microseconds of all that no config decides, and of everything together."""
        shape, weights, conv_state = self.shape, self.layer.delta, self.log.conv_state[0]
        out = torch.randn(self.count, shape.num_value_heads, shape.value_head_dim, device="cuda")
        to = self.projected.new_empty(self.count, shape.value_size)

        def norm() -> None:
            delta_step.gated_norm(out, self.projected, self.layer.norm, EPS, shape, to)

        return {
            "read_rows": 1e3 * replay_ms(lambda: read_rows(self.projected, weights, conv_state, shape), REPLAYS),
            "gated_norm": 1e3 * replay_ms(norm, REPLAYS),
            "many": 1e3 * replay_ms(lambda: self.prefill(), REPLAYS),
        }

    def prefill(self) -> torch.Tensor:
        """A layer without its projections."""
        out = delta_chunk.run_rows(self.projected, self.layer.delta, self.log, self.shape)
        mixed = self.projected.new_empty(self.count, self.shape.value_size)
        delta_step.gated_norm(out, self.projected, self.layer.norm, EPS, self.shape, mixed)
        return mixed

    def kernels(self) -> dict[str, float]:
        """Microseconds of every kernel of one prompt, as the profiler sees them."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                self.prefill()
            torch.cuda.synchronize()
        return {event.key[:60]: getattr(event, "device_time", 0.0) * event.count / 3 for event in seen.key_averages()}


def measured(case: Case, configs: tuple[ChunkConfig, ...]) -> Iterator[dict[str, Any]]:
    """Times and errors of every config that fits the card."""
    from triton.runtime.errors import OutOfResources

    for config in configs:
        try:
            out, state = case.errors(config)
            times = case.times(config)
        except OutOfResources as error:
            yield {"way": str(config), "does_not_fit": str(error)}
            continue
        yield {"way": str(config), "us": times, "error_of_outputs": out, "error_of_state": state}


def told(entry: dict[str, Any]) -> str:
    """One line of the table."""
    if "us" not in entry:
        return f"  {entry['way']}: does not fit"
    times = ", ".join(f"{name} {value:.0f} us" for name, value in entry["us"].items())
    errors = f"outputs {entry['error_of_outputs']:.1e}, state {entry['error_of_state']:.1e}"
    return f"  {entry['way']}: {times}; errors: {errors}"


@torch.inference_mode()
def main() -> None:
    """Measure every shape and length, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--chosen-only", action="store_true", help="leave the candidates out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"what": "Gated-DeltaNet of one layer, random inputs", "at": {}}
    chosen = CONFIGS[torch.bfloat16]
    for target in args.targets:
        for count in args.rows:
            case = Case(shape_of(target), count)
            found: dict[str, Any] = {"us": case.whole(), "kernels_us": case.kernels(), "ways": []}
            print(f"{target}, {count} rows: " + ", ".join(f"{name} {us:.0f} us" for name, us in found["us"].items()))
            print("  kernels: " + ", ".join(f"{name} {us:.0f}" for name, us in found["kernels_us"].items()))
            out, state = case.errors(None)
            print(f"  float32 reference: errors: outputs {out:.1e}, state {state:.1e}")
            found["twin_errors"] = {"outputs": out, "state": state}
            others = () if args.chosen_only else tuple(config for config in CANDIDATES if config != chosen)
            for entry in measured(case, (chosen, *others)):
                found["ways"].append(entry)
                print(told(entry), flush=True)
            result["at"][f"{target}, {count} rows"] = found
            del case
            torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text(json.dumps({**result, "machine": machine(), "versions": versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
