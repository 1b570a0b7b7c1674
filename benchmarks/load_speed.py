"""How fast the fused engine loads a pair, against a plain read of the same files out of the page cache.

    PYTHONPATH=. python benchmarks/load_speed.py FOLDER [--out FILE.json]
    PYTHONPATH=. python benchmarks/load_speed.py qwen3.5-27b --stored int4-g128 [--timing] [--cap 21]

``FOLDER`` holds ``target`` and ``drafter``, as ``random_checkpoint.py`` writes them. A name of the registry instead:
such a pair is written into memory (``--at``, /dev/shm) first, in a layout of ``stored_layouts``, layers that are
alike with the same numbers unless ``--whole``; and removed in the end. Plain: one thread reads every file from front
to back into one reused buffer. Loading: from ``load(...)`` until the weights are in place and checked, and until the
session is ready; the CUDA context and Python's imports are there before. The first run warms the cache, and compiles
kernels where nothing is kept of them: it stands by itself; then the fastest of the others. ``--timing``: a plain step
and a cycle of the loaded pair, as ``dflash bench --weights random`` measures them.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_checkpoint import STORED, build, weight_files
from dflash_local.bench import random_run
from dflash_local.bench.provenance import machine, versions
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.fused import FusedRunner
from dflash_local.events import LoadProgress

BUFFER = 64 * 2**20
BAR = 0.7  # of the plain read's speed
WEIGHTS = ("checking", "target", "drafter")  # stages until the weights are in place
MEMORY = Path("/dev/shm")
GIB = 2**30


def plain_read(files: Sequence[Path], buffer: torch.Tensor) -> float:
    """Seconds to read the files into one buffer, over and over."""
    into = memoryview(buffer.numpy())
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(into):
                pass
    return time.perf_counter() - began


def loading(pair: Pair, config: LoadConfig) -> tuple[Session, dict[str, Any]]:
    """The session; seconds until the weights are in place, and until it is ready; each stage's seconds; peak bytes."""
    marks: list[tuple[str, float]] = []

    def heard(event: LoadProgress) -> None:
        marks.append((event.stage, time.perf_counter()))

    on_gpu = config.device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    session = load(pair, config, heard)
    ended = time.perf_counter()
    placed = next(at for stage, at in marks if stage not in WEIGHTS)
    stages: dict[str, float] = {}
    for (stage, at), (_, until) in zip(marks, [*marks[1:], ("", ended)], strict=True):
        stages[stage] = stages.get(stage, 0.0) + until - at
    peak = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()} if on_gpu else {}
    return session, {"placed_s": placed - began, "ready_s": ended - began, "stages_s": stages, **peak}


def timing(session: Session, context: int) -> dict[str, Any]:
    """Milliseconds at so many committed tokens."""
    runner = session.runner
    if not isinstance(runner, FusedRunner):
        raise SystemExit("--timing measures the fused engine")
    clock = random_run.replay_ms if runner.device.type == "cuda" else random_run.host_ms
    place = random_run.Place(runner.device, runner.target.dtype, clock)
    with torch.inference_mode():
        found = random_run.at_context(runner, context, (runner.target.rows,), place)
    return asdict(found)


def close(session: Session, on_gpu: bool) -> None:
    """Give everything back."""
    session.close()
    del session
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def measure(folder: Path, config: LoadConfig, runs: int, timed: int = 0) -> dict[str, Any]:
    """Both, in turns. ``timed``: committed tokens of the timing, 0 for none."""
    pair = Pair(folder.name, folder / "target", folder / "drafter", bundled=False)
    files = [file for part in ("target", "drafter") for file in weight_files(folder / part)]
    size = sum(file.stat().st_size for file in files)
    on_gpu = config.device != "cpu"
    torch.zeros(1, device=config.device)
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=on_gpu)
    plain_read(files, buffer)
    found: dict[str, Any] = {
        "what": "random checkpoint into the fused engine against a plain read of its files, warm page cache",
        "gib": size / GIB,
    }
    rounds = []
    for run in range(runs):
        plain = plain_read(files, buffer)
        session, told = loading(pair, config)
        rounds.append({"plain_s": plain, **told})
        if run == runs - 1:
            found |= {"stored": session.facts.stored, "notices": list(session.facts.notices)}
            found |= {"timing": timing(session, timed)} if timed else {}
        close(session, on_gpu)
        del session
    best = rounds[1:] or rounds
    plain, placed, ready = (min(each[key] for each in best) for key in ("plain_s", "placed_s", "ready_s"))
    return {
        **found,
        "plain_s": plain,
        "weights_in_place_s": placed,
        "ready_s": ready,
        "first_ready_s": rounds[0]["ready_s"],
        "plain_gib_per_s": size / GIB / plain,
        "loading_gib_per_s": size / GIB / placed,
        "ratio": plain / placed,
        "bar": BAR,
        "rounds": rounds,
        "load": asdict(config),
        "machine": machine(),
        "versions": versions(),
    }


def tell(found: dict[str, Any]) -> None:
    """Print it."""
    print(
        f"{found['gib']:.2f} GiB: plain read {found['plain_s']:.2f} s ({found['plain_gib_per_s']:.1f} GiB/s), weights "
        f"in place after {found['weights_in_place_s']:.2f} s ({found['loading_gib_per_s']:.1f} GiB/s), "
        f"ready after {found['ready_s']:.2f} s, the first time {found['first_ready_s']:.2f}; "
        f"ratio {found['ratio']:.2f}, bar {BAR}"
    )
    last = found["rounds"][-1]
    print("  stages: " + ", ".join(f"{stage} {span:.2f} s" for stage, span in last["stages_s"].items()))
    if "peak" in last:
        print(f"  peak {last['peak'] / GIB:.2f} GiB, taken from the device {last['reserved'] / GIB:.2f}")
    for notice in found["notices"]:
        print(f"  {notice}")
    if "timing" in found:
        at = found["timing"]
        cycles = ", ".join(f"{rows} rows {figure['ms']:.3f} ms" for rows, figure in at["cycle"].items())
        print(f"  at {at['context']} tokens: plain step {at['step']['ms']:.3f} ms, cycle {cycles}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one pair and say how it compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a folder, or a name of the registry")
    parser.add_argument("--stored", choices=STORED, help="the layout that a named pair is written in; else bfloat16")
    parser.add_argument("--whole", action="store_true", help="each layer has numbers of its own")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true", help="toy widths")
    parser.add_argument("--at", type=Path, default=MEMORY if MEMORY.is_dir() else None, help="where it is written")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--drafter-precision", default="auto")
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--timing", nargs="?", type=int, const=1024, default=0, metavar="TOKENS")
    parser.add_argument("--cap", type=float, metavar="GIB", help="what torch's allocator may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    config = LoadConfig(
        device=args.device,
        engine="fused",
        dtype="bfloat16",
        context=args.context,
        drafter_precision=args.drafter_precision,
        offload=args.offload,
    )
    if args.cap is not None and args.device != "cpu":
        torch.cuda.set_per_process_memory_fraction(args.cap * GIB / torch.cuda.mem_get_info()[1])
    with ExitStack() as stack:
        folder = Path(args.pair)
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="random-", dir=args.at)))
            began = time.perf_counter()
            build(
                args.pair,
                folder,
                layers=args.layers,
                tiny=args.tiny,
                device=args.device,
                stored=args.stored,
                tiled=not args.whole,
            )
            print(f"written in {time.perf_counter() - began:.1f} s")
            gc.collect()
            if args.device != "cpu":
                torch.cuda.empty_cache()
        found = {"pair": args.pair, "layout": args.stored, **measure(folder, config, args.runs, args.timing)}
    tell(found)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
