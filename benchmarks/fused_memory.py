"""Predicted against real peak memory of the fused engine: a pair's context reserved, filled and replied to its end.

    PYTHONPATH=. python benchmarks/fused_memory.py FOLDER --context 32768 [--cap 22.5] [--out FILE.json]

``FOLDER`` holds ``target`` and ``drafter``, as ``random_checkpoint.py`` writes them. ``--cap`` lets torch's allocator
take so many GiB only, as on a smaller card; what the planner says of such a card is printed before anything is loaded.
Two replies: a greedy one through recorded graphs, and one sampled with every filter. One process per measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import Meter, shapes
from dflash_local.bench.provenance import machine as this_computer
from dflash_local.bench.provenance import versions
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.errors import DFlashError
from dflash_local.events import Finished, Started, Step
from dflash_local.planner.fused_memory import ledger
from dflash_local.planner.ledger import Ledger
from dflash_local.planner.load import Load
from dflash_local.planner.machine import Machine
from dflash_local.planner.memory import GPU_RESERVE
from dflash_local.planner.plan import plan
from dflash_local.request import Limits, Request, SamplingParams

GIB = 2**30
TOKENS = 63  # of each reply: the last block reaches the context's end
BAR = 0.03
SAMPLINGS = {
    "greedy": SamplingParams(),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=1),
}


def card(cap: float | None, device: str) -> Machine:
    """The device with what is free of it; with a cap, one whose allocator may take so much beside its own reserve."""
    if device == "cpu":
        free = total = round((cap or 1) * GIB)
    else:
        free, total = torch.cuda.mem_get_info()
    if cap is not None:
        free = round(cap * GIB) + GPU_RESERVE
    return Machine(f"a card of {(cap or total / GIB):g} GiB", "cuda", total, free, "", device)


def reply(session: Session, context: int, sampling: SamplingParams, seed: int, meter: Meter) -> dict[str, Any]:
    """One reply whose last token is the context's last, and the memory of its prompt and of its cycles."""
    generator = torch.Generator().manual_seed(seed)
    vocab = session.runner.target.vocab_size
    ids = tuple(torch.randint(0, vocab, (context - TOKENS,), generator=generator).tolist())
    found: dict[str, Any] = {"prompt_tokens": len(ids), "emitted": 0, "drafted": 0}
    meter.restart()
    # The block size by name: random weights accept next to nothing, and drafting must not be switched off here.
    block = session.facts.block_size
    for event in session.generate(Request(prompt_ids=ids, sampling=sampling, limits=Limits(TOKENS), block_size=block)):
        if isinstance(event, Started):
            found["prompt"] = meter.read()
            meter.restart()
        if isinstance(event, Step):
            found["emitted"] += len(event.token_ids)
            found["drafted"] += event.drafted
        if isinstance(event, Finished):
            found["reason"] = event.reason
    found["cycles"] = meter.read()
    return found


def run(pair: Pair, config: LoadConfig, meter: Meter) -> dict[str, Any]:
    """Load and reply; what ran out of memory is told instead."""
    measured: dict[str, Any] = {"error": None}
    try:
        meter.restart()
        session = load(pair, config)
        measured["load"] = meter.read()
        measured["notices"] = session.facts.notices
        for seed, (name, sampling) in enumerate(SAMPLINGS.items()):
            measured[name] = reply(session, session.facts.context, sampling, seed, meter)
    except (DFlashError, torch.OutOfMemoryError) as error:
        measured["error"] = str(error).splitlines()[0]
    parts = [measured.get("load"), *(measured.get(name, {}).get(part) for name in SAMPLINGS for part in PARTS)]
    measured["peak"] = max((part["peak"] for part in parts if part), default=0)
    measured["reserved"] = max((part["reserved"] for part in parts if part), default=0)
    return measured


PARTS = ("prompt", "cycles")


def tell(book: Ledger, found: dict[str, Any]) -> None:
    """Print the two beside each other."""
    for line in book.lines:
        print(f"  {line.name:<22} {(line.bytes or 0) / GIB:8.3f} GiB  {line.note}")
    for line in book.host:
        print(f"  {line.name:<22} {(line.bytes or 0) / GIB:8.3f} GiB in host memory; {line.note}")
    print(f"  {'running':<22} {(book.running or 0) / GIB:8.3f} GiB; loading {(book.loading.bytes or 0) / GIB:.3f} GiB")
    measured = found["measured"]
    for name in ("load", *SAMPLINGS):
        for part in (None,) if name == "load" else PARTS:
            at = measured.get(name) if part is None else measured.get(name, {}).get(part)
            if at:
                what = name if part is None else f"{name} {part}"
                held, peak, reserved = (at[key] / GIB for key in ("held", "peak", "reserved"))
                print(
                    f"  measured {what:<16} peak {peak:.3f} GiB, held {held:.3f}, taken from the device {reserved:.3f}"
                )
    for name in SAMPLINGS:
        if name in measured:
            print(f"  {name}: {measured[name]['emitted']} tokens, ended by {measured[name].get('reason')}")
    if measured["error"]:
        print(f"  failed: {measured['error']}")
    print(
        f"predicted peak {found['predicted_peak'] / GIB:.3f} GiB, measured {measured['peak'] / GIB:.3f} GiB: off by "
        f"{found['off_by']:+.2%}, bar {BAR:.0%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one context and say how the planner did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--cap", type=float, metavar="GIB")
    parser.add_argument(
        "--drafter-precision", default="full", help="auto tries coarser ones, which the planner does not count"
    )
    parser.add_argument("--offload", default="auto", help="auto: as planned")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    target, drafter = shapes(args.folder)
    where = card(args.cap, args.device)
    asked = LoadConfig(
        dtype="bfloat16",
        device=args.device,
        context=args.context,
        engine="fused",
        drafter_precision=args.drafter_precision,
        offload=args.offload,
    )
    said = plan(target, drafter, where, asked)
    print(f"the planner, before: {'fits' if said.fits else 'does not fit'}; {said.reason}")
    if args.cap is not None and args.device != "cpu":
        torch.cuda.set_per_process_memory_fraction(args.cap * GIB / where.memory)
    load = said.load if said.fits else asked
    book = ledger(target, drafter, Load.of("cuda", load, args.context, drafter.block_size or 0))
    pair = Pair(args.folder.name, args.folder / "target", args.folder / "drafter", bundled=False)
    measured = run(pair, load, Meter(args.device))
    predicted = book.peak or 0
    found = {
        "what": "fused engine, random weights of true shapes, batch 1: predicted and measured memory, bytes",
        "context": args.context,
        "cap_gib": args.cap,
        "drafter_precision": load.drafter_precision,
        "offload": load.offload,
        "stored": said.stored,
        "planned": said.as_dict(),
        "predicted": book.as_dict(),
        "predicted_peak": predicted,
        "measured": measured,
        "off_by": predicted / measured["peak"] - 1 if measured["peak"] else 0.0,
        "bar": BAR,
        "machine": this_computer(),
        "versions": versions(),
    }
    tell(book, found)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
