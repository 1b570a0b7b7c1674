"""How fast the fused engine loads a pair, against a plain read of the same files out of the page cache.

    PYTHONPATH=. python benchmarks/load_speed.py FOLDER [--out FILE.json]

``FOLDER`` holds ``target`` and ``drafter``, as ``random_checkpoint.py`` writes them. Plain: one thread reads every file
from front to back into one reused buffer. Loading: from ``load(...)`` until the weights are in place and checked; the
CUDA context and Python's imports are there before. Fastest of the runs of each, in turns; the first warms the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, load
from dflash_local.events import LoadProgress

BUFFER = 64 * 2**20
BAR = 0.7  # of the plain read's speed
WEIGHTS = ("checking", "target", "drafter")  # stages until the weights are in place


def plain_read(files: Sequence[Path], buffer: torch.Tensor) -> float:
    """Seconds to read the files into one buffer, over and over."""
    into = memoryview(buffer.numpy())
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(into):
                pass
    return time.perf_counter() - began


def loading(pair: Pair, device: str, context: int) -> tuple[float, float]:
    """Seconds until the weights are in place, and until the session is ready."""
    marks: list[tuple[str, float]] = []

    def heard(event: LoadProgress) -> None:
        marks.append((event.stage, time.perf_counter()))

    began = time.perf_counter()
    session = load(pair, LoadConfig(device=device, engine="fused", dtype="bfloat16", context=context), heard)
    ready = time.perf_counter() - began
    session.close()
    del session
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    placed = next(at for stage, at in marks if stage not in WEIGHTS) - began
    return placed, ready


def measure(folder: Path, device: str, runs: int, context: int) -> dict[str, Any]:
    """Both, in turns."""
    pair = Pair(folder.name, folder / "target", folder / "drafter", bundled=False)
    files = sorted(file for part in ("target", "drafter") for file in (folder / part).glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    on_gpu = device != "cpu"
    torch.zeros(1, device=device)
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=on_gpu)
    plain_read(files, buffer)
    rounds = [(plain_read(files, buffer), *loading(pair, device, context)) for _ in range(runs)]
    plain, placed, ready = (min(column) for column in zip(*rounds))
    return {
        "what": "bf16 checkpoint into the fused engine against a plain read of its files, warm page cache",
        "gib": size / 2**30,
        "plain_s": plain,
        "weights_in_place_s": placed,
        "ready_s": ready,
        "plain_gib_per_s": size / 2**30 / plain,
        "loading_gib_per_s": size / 2**30 / placed,
        "ratio": plain / placed,
        "bar": BAR,
        "rounds": rounds,
        "device": device,
        "machine": machine(),
        "versions": versions(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one folder and say how it compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    wish = parser.parse_args(arguments)
    found = measure(wish.folder, wish.device, wish.runs, wish.context)
    print(
        f"{found['gib']:.2f} GiB: plain read {found['plain_s']:.2f} s ({found['plain_gib_per_s']:.1f} GiB/s), weights "
        f"in place after {found['weights_in_place_s']:.2f} s ({found['loading_gib_per_s']:.1f} GiB/s), "
        f"ready after {found['ready_s']:.2f} s; ratio {found['ratio']:.2f}, bar {BAR}"
    )
    if wish.out is not None:
        wish.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
