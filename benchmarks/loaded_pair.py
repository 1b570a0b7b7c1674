"""A pair in files on the fused engine, random weights: time to load, memory beside its plan, and times of a cycle.

    PYTHONPATH=. python benchmarks/loaded_pair.py qwen3.5-27b --stored int4-g128 --context 32768 --cap 21 --fill

A pair is a folder of ``random_checkpoint.py``, or a name of the registry: that is written into memory (``--at``) first,
layers that are alike with the same numbers unless ``--whole``, and removed in the end. Loading stands beside a plain
read of the same files by one thread; the first run compiles kernels and stands by itself. ``--cap`` lets torch's
allocator take so many GiB only, as on a smaller card; what the planner says of such a card is printed first. Given
twice, the layers lie over two such cards (``--device balanced``), and each one's peak stands beside its plan. Then,
with ``--fill``, two replies to the context's end; and a plain step and a cycle as ``dflash bench`` measures them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.random_checkpoint import add_options, add_place, build
from dflash_local.app.fitting import folder_shapes
from dflash_local.bench import random_run
from dflash_local.bench.fidelity import give_back
from dflash_local.bench.provenance import machine, versions
from dflash_local.bench.trial import go_on
from dflash_local.catalog.bundled import Pair
from dflash_local.checkpoint_files.source import open_source
from dflash_local.engine import LoadConfig, Session, load, load_fused
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.planner.fused_memory import GAPS
from dflash_local.planner.ledger import Ledger
from dflash_local.planner.machine import Machine
from dflash_local.planner.memory import GPU_RESERVE
from dflash_local.planner.plan import Plan, plan
from dflash_local.request import Limits, Request, SamplingParams

GIB = 2**30
BUFFER = 64 * 2**20
TOKENS = 63  # of each reply: the last block reaches the context's end
WEIGHTS = ("checking", "target", "drafter")  # stages until the weights are in place
SAMPLINGS = {
    "greedy": SamplingParams(),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=1),
}


def card(caps: Sequence[float], device: str) -> Machine:
    """Describe the device with what is free of it; with caps, cards whose allocators may take so much."""
    free, total = torch.cuda.mem_get_info() if device != "cpu" else (GIB, GIB)
    for index, cap in enumerate(caps if device != "cpu" else ()):
        torch.cuda.set_per_process_memory_fraction(cap * GIB / total, index)
    each = tuple(round(cap * GIB) + GPU_RESERVE for cap in caps) or (free,)
    sizes = " and ".join(f"{cap:g}" for cap in caps or (total / GIB,))
    where = Machine(f"cards of {sizes} GiB", "cuda", total, sum(each), "", device)
    return replace(where, cards=tuple(replace(where, free=free) for free in each)) if len(each) > 1 else where


def peaks(device: str) -> list[int]:
    """Read the most that torch's allocator held on each card since the last call; 0 on a CPU."""
    found = []
    for index in range(torch.cuda.device_count() if device != "cpu" else 0):
        torch.cuda.synchronize(index)
        found.append(torch.cuda.max_memory_allocated(index))
        torch.cuda.reset_peak_memory_stats(index)
    return found or [0]


def planned_peaks(book: Ledger) -> list[int]:
    """Return what the plan expects torch's allocator to hold at most, on each card."""
    return [round((need - GPU_RESERVE) / (1 + GAPS)) for need in book.cards] or [book.peak or 0]


def plain_read(files: Sequence[Path], buffer: torch.Tensor) -> float:
    """Read the files into one buffer, over and over; the seconds."""
    into = memoryview(buffer.numpy())
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(into):
                pass
    return time.perf_counter() - began


def loading(pair: Pair, config: LoadConfig) -> tuple[Session, dict[str, Any]]:
    """Load the pair; seconds until the weights are in place and until it is ready, and the peak in bytes."""
    marks: list[tuple[str, float]] = []
    peaks(config.device)
    began = time.perf_counter()
    session = load(pair, config, lambda event: marks.append((event.stage, time.perf_counter())))
    ready = time.perf_counter() - began
    placed = next(at for stage, at in marks if stage not in WEIGHTS) - began
    return session, {"placed_s": placed, "ready_s": ready, "peak": peaks(config.device)}


def reply(session: Session, sampling: SamplingParams) -> dict[str, Any]:
    """Write one reply whose last token is the context's last, behind two turns whose snapshots stay."""
    count, vocab = session.facts.context - TOKENS, session.runner.target.vocab_size
    ids = tuple(torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1)).tolist())
    # The block size by name: random weights accept next to nothing, and drafting must not be switched off here.
    block = session.facts.block_size
    session.reset()
    for turn in (1, 2):
        go_on(session, Request(prompt_ids=ids[: turn * TOKENS], limits=Limits(1)))
    written = go_on(session, Request(prompt_ids=ids, sampling=sampling, limits=Limits(TOKENS), block_size=block))
    drafted = sum(cycle.drafted for cycle in written.cycles)
    found = {"emitted": len(written.ids), "drafted": drafted, "reason": written.reason}
    return found | {"peak": peaks(str(session.facts.device))}


def timing(session: Session, context: int) -> dict[str, Any]:
    """Measure a plain step and cycles at so many committed tokens, in milliseconds."""
    runner = session.runner
    assert isinstance(runner, FusedRunner)
    clock = random_run.replay_ms if runner.device.type == "cuda" else random_run.host_ms
    place = random_run.Place(runner.device, runner.target.dtype, clock)
    with torch.inference_mode():
        return asdict(random_run.at_context(runner, context, (session.facts.block_size,), place))


def measure(folder: Path, config: LoadConfig, runs: int, timed: int, samplings: Sequence[str]) -> dict[str, Any]:
    """Load several times, each beside a plain read; the last one replies, and is timed at ``timed`` tokens."""
    pair = Pair(folder.name, folder / "target", folder / "drafter", bundled=False)
    files = [file for part in ("target", "drafter") for file in open_source(folder / part).headers()]
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=config.device != "cpu")
    plain_read(files, buffer)  # into the page cache
    found: dict[str, Any] = {"gib": sum(file.stat().st_size for file in files) / GIB, "rounds": []}
    for run in range(runs):
        plain = plain_read(files, buffer)
        session, told = loading(pair, config)
        found["rounds"].append({"plain_s": plain, **told})
        if run == runs - 1:
            found |= {"stored": session.facts.stored, "notices": list(session.facts.notices)}
            found["replies"] = {name: reply(session, SAMPLINGS[name]) for name in samplings}
            found["timing"] = timing(session, timed)
        session.close()
        del session
        give_back()
    every = (part["peak"] for part in (*found["rounds"], *found["replies"].values()))
    found["peak"] = [max(each) for each in zip(*every, strict=True)]
    return found


def tell(said: Plan, found: dict[str, Any]) -> None:
    """Print plan and measurements beside each other."""
    size, first = found["gib"], found["rounds"][0]
    plain, placed, ready = (
        min(each[key] for each in found["rounds"][1:] or [first]) for key in ("plain_s", "placed_s", "ready_s")
    )
    print(
        f"{size:.2f} GiB: plain read {plain:.2f} s ({size / plain:.1f} GiB/s), weights in place after {placed:.2f} s "
        f"({size / placed:.1f} GiB/s), ready after {ready:.2f} s, the first time {first['ready_s']:.2f}"
    )
    for line in (*said.ledger.lines, *said.ledger.host):
        print(f"  {line.name:<22} {(line.bytes or 0) / GIB:8.3f} GiB  {line.note}")
    for peak, held in zip(planned_peaks(said.ledger), found["peak"], strict=False):
        off = f", off by {peak / held - 1:+.2%}" if held else ""
        print(f"predicted peak {peak / GIB:.3f} GiB, measured {held / GIB:.3f} GiB{off}")
    for name, written in found["replies"].items():
        print(f"  {name}: {written['emitted']} tokens, ended by {written['reason']}")
    at = found["timing"]
    cycles = ", ".join(f"{rows} rows {figure['ms']:.3f} ms" for rows, figure in at["cycle"].items())
    print(f"at {at['context']} tokens: plain step {at['step']['ms']:.3f} ms, cycle {cycles}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="a folder, or a name of the registry")
    add_options(parser)
    add_place(parser)
    parser.add_argument("--whole", action="store_true", help="each layer has numbers of its own")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--drafter-precision", default="full", help="auto tries coarser ones, which no plan counts")
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--offload", default="auto", help="auto: as planned")
    parser.add_argument("--fill", action="store_true", help="two replies to the context's end, one with every filter")
    parser.add_argument("--timing", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--cap", type=float, metavar="GIB", action="append", help="what torch's allocator may take")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    caps = args.cap or []
    same = {name: getattr(args, name) for name in ("context", "drafter_precision", "kv_cache", "offload")}
    device = "balanced" if len(caps) > 1 else args.device
    asked = LoadConfig(engine="fused", dtype="bfloat16", device=device, **same)
    with ExitStack() as stack:
        folder = Path(args.pair)
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="random-", dir=args.at)))
            shape = {"layers": args.layers, "tiny": args.tiny, "stored": args.stored, "tiled": not args.whole}
            build(args.pair, folder, device=args.device, **shape)
        known = folder_shapes(args.pair, folder / "target", folder / "drafter")
        assert known is not None
        where = card(caps, device)
        stack.enter_context(mock.patch.object(load_fused, "free_bytes", lambda cards: where.free_of_cards))
        said = plan(known.target, known.drafter, where, asked)
        print(f"the planner, before: {'fits' if said.fits else 'does not fit'}; {said.reason}")
        config = said.load if said.fits else asked
        found = measure(folder, config, args.runs, args.timing, list(SAMPLINGS) if args.fill else ())
    tell(said, found)
    if args.out is not None:
        record = {"what": "random weights of true shapes, fused engine", "pair": args.pair, "layout": args.stored}
        record |= {"cap_gib": caps, "load": asdict(config), "planned": said.as_dict(), **found}
        text = json.dumps(record | {"machine": machine(), "versions": versions()}, indent=2)
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
