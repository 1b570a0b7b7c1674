"""Predicted against real peak memory of the reference engine, on random weights of true shapes.

    PYTHONPATH=. python3 benchmarks/memory.py --work FOLDER --out FOLDER [--tiny]

Builds Qwen3-8B and Qwen3.5-9B shapes with their drafters, loads them as any pair is loaded, fills
the context and compares torch's allocator with the planner's ledger. Needs a GPU of 48 GB and 25 GB of
disk; ``--tiny`` runs the same on a CPU in seconds, where only the prediction is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import random_pair
from benchmarks.memory_report import lines, verdict
from dflash_local.bench import provenance
from dflash_local.catalog.bundled import Pair
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.features import ModelConfig
from dflash_local.config.read_model import read_model
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.events import Mode, Started, Step
from dflash_local.planner.ledger import Ledger
from dflash_local.planner.memory import Load, ledger
from dflash_local.request import Limits, Request, SamplingParams
from dflash_local.store.atomic import write_atomic

# Of each reply: more than a block, so that the last blocks reach the context's end, and fewer than the
# misses after which the engine drafts no more; odd, since prompts seldom have the width that kernels like.
TOKENS = 31
MARGINS = (0.0, 0.02, 0.05, 0.1, 0.2)  # over the prediction, until a reply is whole within that limit


@dataclass(frozen=True, slots=True)
class Case:
    """A pair's shape and the contexts to fill."""

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    contexts: tuple[int, ...]


CONTEXTS = (1024, 8192, 32768)
FULL = (
    Case("Qwen3-8B", random_pair.QWEN3_8B, random_pair.DRAFTER_8B, CONTEXTS),
    Case("Qwen3.5-9B", random_pair.QWEN35_9B, random_pair.DRAFTER_9B, CONTEXTS),
)
SMALL = (
    Case("tiny Qwen3", random_pair.TINY_DENSE, random_pair.TINY_DENSE_DRAFTER, (1100,)),
    Case("tiny Qwen3.5", random_pair.TINY, random_pair.TINY_DRAFTER, (1100,)),
)


class Meter:
    """torch's own account of the device's memory; every figure is None on a CPU."""

    def __init__(self, device: str) -> None:
        self.on = device != "cpu"

    def restart(self) -> None:
        """Forget the peak so far."""
        if self.on:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """The most that was allocated since ``restart``."""
        return torch.cuda.max_memory_allocated() if self.on else None

    def held(self) -> int | None:
        """What is allocated now."""
        return torch.cuda.memory_allocated() if self.on else None

    def reserved(self) -> int | None:
        """The most the allocator took from the device since ``restart``."""
        return torch.cuda.max_memory_reserved() if self.on else None

    def read(self) -> dict[str, int]:
        """All three; zeros on a CPU."""
        return {"held": self.held() or 0, "peak": self.peak() or 0, "reserved": self.reserved() or 0}

    def used(self) -> int | None:
        """What nvidia-smi says the device has in use, all programs together."""
        if not self.on:
            return None
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        first = answer.split()[:1]
        return int(first[0]) * 2**20 if first and first[0].isdigit() else None


def shapes(folder: Path) -> tuple[ModelConfig, DrafterConfig]:
    """What the planner reads from the two configs."""
    configs = [
        json.loads((folder / part / "config.json").read_text(encoding="utf-8")) for part in ("target", "drafter")
    ]
    target = read_model(configs[0], folder.name)
    return target, DrafterConfig.from_shape(configs[1], "drafter")


def request(vocab: int, context: int, mode: Mode) -> Request:
    """A random prompt and a reply whose last token is the context's last; sampled, so that the noise is counted."""
    generator = torch.Generator().manual_seed(context)
    ids = tuple(torch.randint(0, vocab, (context - TOKENS,), generator=generator).tolist())
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=context)
    return Request(prompt_ids=ids, sampling=sampling, limits=Limits(TOKENS), mode=mode)


def fill(session: Session, context: int, mode: Mode, meter: Meter) -> dict[str, Any]:
    """One reply that fills the context."""
    meter.restart()
    prefill, held, steps, started = None, None, [], time.perf_counter()
    for event in session.generate(request(session.runner.target.vocab_size, context, mode)):
        if isinstance(event, Step):
            steps.append(event)
        if isinstance(event, Started):
            prefill, held = meter.peak(), meter.held()
            meter.restart()
    decode = meter.peak()
    both = [peak for peak in (prefill, decode) if peak is not None]
    return {
        "prefill_peak": prefill,
        "decode_peak": decode,
        "peak": max(both) if both else None,
        "held_after_prefill": held,
        "held": meter.held(),
        "reserved": meter.reserved(),
        "device_used": meter.used(),
        "drafted_cycles": sum(step.drafted > 0 for step in steps),
        "seconds": time.perf_counter() - started,
    }


@dataclass(frozen=True, slots=True)
class Bench:
    """One checkpoint on a device, and how its pair is loaded."""

    case: Case
    folder: Path
    device: str
    draft: bool

    @property
    def mode(self) -> Mode:
        """How it replies."""
        return "dflash" if self.draft else "ar"

    def session(self, context: int) -> Session:
        """The pair, loaded as any other."""
        pair = Pair(self.case.name, self.folder / "target", self.folder / "drafter", bundled=False)
        options = LoadConfig(
            dtype="bfloat16", device=self.device, engine="reference", draft=self.draft, context=context
        )
        return load(pair, options)

    def predicted(self, context: int) -> Ledger:
        """The planner's ledger."""
        target, drafter = shapes(self.folder)
        block = self.case.drafter["block_size"] if self.draft else 1
        return ledger(
            target, drafter if self.draft else None, Load("bfloat16", None, context, block, self.device, snapshots=1)
        )

    def row(self, context: int) -> dict[str, Any]:
        """Predicted and real figures of one context, from a fresh load on."""
        meter = Meter(self.device)
        meter.restart()
        session = self.session(context)
        measured = {"loading_peak": meter.peak(), "loaded": meter.held()} | fill(session, context, self.mode, meter)
        session.close()
        del session
        self.release()
        return {
            "shape": self.case.name,
            "mode": self.mode,
            "context": context,
            "predicted": self.predicted(context).as_dict(),
            "measured": measured,
        }

    def release(self) -> None:
        """Give everything back to the device."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def tight(self, context: int) -> float | None:
        """The least margin over the predicted peak at which a whole reply fits a device of that size."""
        peak = self.predicted(context).peak
        if self.device == "cpu" or peak is None:
            return None
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            for margin in MARGINS:
                torch.cuda.set_per_process_memory_fraction(min(1.0, peak * (1 + margin) / total))
                if self.whole(context):
                    return margin
            return None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def whole(self, context: int) -> bool:
        """Load, fill the context, and tell whether memory sufficed."""
        try:
            session = self.session(context)
            fill(session, context, self.mode, Meter(self.device))
            session.close()
            return True
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            session = None  # type: ignore[assignment]
            self.release()


def measure(case: Case, folder: Path, device: str, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """All rows of a case, with the drafter and without; the fullest is tried on a device of just that size."""
    for draft in (True, False):
        bench = Bench(case, folder, device, draft)
        for context in case.contexts:
            say(f"{case.name}: {context} tokens, {bench.mode}")
            row = bench.row(context)
            if draft and context == max(case.contexts):
                say(f"{case.name}: {context} tokens, within the predicted size")
                row["margin_needed"] = bench.tight(context)
            yield row


def run(cases: Sequence[Case], work: Path, device: str) -> dict[str, Any]:
    """Build, load, fill and compare, one shape after the other; checkpoints are removed at once."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    for case in cases:
        folder = work / case.name.replace(" ", "-")
        say(f"{case.name}: building")
        random_pair.build_target(folder / "target", case.target, device)
        random_pair.build_drafter(folder / "drafter", case.drafter, case.target, device)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
        rows += measure(case, folder, device, say)
        shutil.rmtree(folder)
    return {
        "report": "memory of the reference engine",
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "rows": rows,
        "verdict": verdict(rows),
        "elapsed_s": time.perf_counter() - started,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON report")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints (25 GB)")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on the CPU, in seconds")
    args = parser.parse_args(arguments)
    results = run(SMALL if args.tiny else FULL, args.work, "cpu" if args.tiny else "cuda")
    write_atomic(args.out / "memory.json", json.dumps(results, indent=1) + "\n", 0o644)
    print("\n".join(lines(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
