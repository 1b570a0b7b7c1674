"""Builds a random-weight pair of true Qwen3.5-9B shape and measures exactness and times on it.

    PYTHONPATH=. python3 benchmarks/random_qwen35_9b.py --work FOLDER --out FOLDER [--tiny]

Random weights: exactness and milliseconds mean something, acceptance and text do not. A random drafter
is almost never right, so commits are exercised by a planted one that knows the text and errs at every
sixth position. Needs a GPU of 80 GB and 25 GB of disk; ``--tiny`` runs the same on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_pair import DRAFTER_9B, QWEN35_9B, TINY, TINY_DRAFTER, build_drafter, build_target
from dflash_local.bench import certificate, report
from dflash_local.bench import certify as certifying
from dflash_local.catalog.bundled import Pair
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.cycle import Cycle
from dflash_local.engine.reference import Proposer
from dflash_local.engine.sampling import Sampler
from dflash_local.request import SamplingParams
from dflash_local.store.atomic import write_atomic

RANDOM = "random weights: shapes and times are real, text and acceptance are not"
ERR_EVERY = 6
BUDGET_S = 270.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run: prompt lengths and reply tokens of the proofs, context and steps of the timing.

    The random drafter, one token a cycle, gets one prompt and a third of the tokens.
    """

    target: dict[str, Any]
    drafter: dict[str, Any]
    exact_prompts: tuple[int, ...]
    exact_tokens: int
    fast_prompts: tuple[int, ...]
    fast_tokens: int
    context: int
    steps: int
    cycles: int


FULL = Size(QWEN35_9B, DRAFTER_9B, (40, 300), 32, (40, 300), 72, 1024, 150, 30)
SMALL = Size(TINY, TINY_DRAFTER, (5, 40), 24, (5, 40), 24, 64, 24, 8)


# --- the planted drafter -----------------------------------------------------------------------------


class Planted:
    """Knows the text, errs at every sixth position, and lets the real drafter do its work beside it.

    So a cycle costs what it would cost with a trained drafter of this acceptance.
    """

    def __init__(self, text: Sequence[int], vocab: int, beside: Proposer | None = None) -> None:
        self.text, self.vocab, self.beside, self.length = list(text), vocab, beside, 0

    def extend(self, taps: torch.Tensor, start: int) -> None:
        self.length = start + len(taps)
        if self.beside is not None:
            self.beside.extend(taps, start)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        if self.beside is not None:
            self.beside.truncate(length)

    def propose(
        self, anchor: int, start: int, count: int, sampler: Sampler, noise: torch.Tensor | None
    ) -> torch.Tensor:
        ids = [self._token(start + 1 + i) for i in range(count)]
        device = "cpu"
        if self.beside is not None:
            device = str(self.beside.propose(anchor, start, count, sampler, noise).device)
        return torch.tensor(ids, device=device)

    def _token(self, position: int) -> int:
        known = self.text[position] if position < len(self.text) else 0
        return (known + (position % ERR_EVERY == 0)) % self.vocab


# --- what is measured --------------------------------------------------------------------------------


@torch.inference_mode()
def logit_spread(session: Session) -> float:
    """Standard deviation of the logits after a random prompt."""
    target = session.runner.target
    target.clear()
    out = target.prefill(random_ids(target.vocab_size, 64, 3).to(target.device), False)
    spread = float(target.head(out.hidden).float().std())
    session.reset()
    return spread


def random_ids(vocab: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def plan_of(session: Session, prompts: Sequence[int], tokens: int) -> certifying.Plan:
    vocab = session.runner.target.vocab_size
    ids = tuple(tuple(random_ids(vocab, length, length).tolist()) for length in prompts)
    return certifying.Plan(ids, certifying.cases(7)[:2], (session.facts.block_size,), tokens)


def prove(session: Session, plan: certifying.Plan, planted: bool) -> dict[str, Any]:
    """Certify with the random drafter, or with the planted one."""
    own = session.runner.proposer

    def plant(prompt: tuple[int, ...], reply: tuple[int, ...]) -> Proposer:
        return Planted((*prompt, *reply), session.runner.target.vocab_size, own)

    started = time.perf_counter()
    found = certifying.certify(session, plan, plant=plant if planted else None)
    lengths = [run.mean_acceptance_length for run in found.runs if run.mean_acceptance_length]
    return {
        "drafter": "planted" if planted else "random",
        "dtype": session.facts.dtype,
        "statement": certificate.statement(found, session.facts.dtype),
        "mean_acceptance_length": statistics.mean(lengths) if lengths else None,
        "wall_s": time.perf_counter() - started,
        **report.finite(asdict(found)),
    }


def time_cycles(
    session: Session, prompt: Sequence[int], count: int, proposer: Proposer | None
) -> tuple[list[int], list[float], list[Cycle]]:
    """Greedy decoding from a cold start: text so far, and milliseconds and figures of each cycle.

    A cycle's time covers the commit of the one before it; the device is idle at both ends.
    """
    session.reset()
    runner = session.runner
    own, runner.proposer = runner.proposer, proposer
    ids = torch.tensor(list(prompt), device=runner.target.device)
    sampler = Sampler(SamplingParams(), 0, runner.target.vocab_size, ids)
    times: list[float] = []
    cycles: list[Cycle] = []
    try:
        runner.begin(sampler, frozenset(), session.facts.block_size if proposer else 1, proposer is not None)
        with torch.inference_mode():
            for _ in runner.prefill(prompt, 0):
                pass
            while len(times) < count:
                _idle(runner.target.device)
                start = time.perf_counter()
                runner.launch()
                _idle(runner.target.device)
                times.append(1e3 * (time.perf_counter() - start))
                cycles += runner.collect()
        return list(runner.ids), times, cycles
    finally:
        runner.proposer = own
        session.reset()


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(session: Session, size: Size) -> dict[str, Any]:
    """Milliseconds of an AR step and of a DFlash cycle, the latter with the real drafter's cost in it."""
    prompt = random_ids(session.runner.target.vocab_size, size.context, 5).tolist()
    own = session.runner.proposer
    text, single, _ = time_cycles(session, prompt, size.steps, None)
    _, _, _ = time_cycles(session, prompt, 3, own)  # first kernels of this width
    _, drafted, cycles = time_cycles(session, prompt, size.cycles, own)
    knowing = Planted(text, session.runner.target.vocab_size, own)
    _, planted, hits = time_cycles(session, prompt, size.steps // ERR_EVERY, knowing)
    return {
        "context": size.context,
        "ar_step_ms": statistics.median(single),
        "ar_steps": len(single),
        "random_drafter": _cycle_figures(drafted, cycles),
        "planted_drafter": _cycle_figures(planted, hits),
    }


def _cycle_figures(times: Sequence[float], cycles: Sequence[Cycle]) -> dict[str, Any]:
    return {
        "cycle_ms": statistics.median(times),
        "draft_ms": 1e3 * statistics.median(cycle.draft_s for cycle in cycles),
        "verify_ms": 1e3 * statistics.median(cycle.verify_s for cycle in cycles),
        "acceptance_length": statistics.mean(len(cycle.ids) for cycle in cycles),
        "cycles": len(times),
    }


# --- the run -----------------------------------------------------------------------------------------


class Clock:
    """Says what is going on and whether there is time for more."""

    def __init__(self, budget_s: float) -> None:
        self.started, self.budget_s = time.perf_counter(), budget_s

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def say(self, text: str) -> None:
        print(f"[{self.elapsed_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def attempt(self, what: str, part: Callable[[], Any]) -> Any:
        """The part's result, or None when the budget is spent."""
        if self.elapsed_s > self.budget_s:
            self.say(f"skipped for time: {what}")
            return None
        self.say(what)
        return part()


def run(size: Size, work: Path, device: str, clock: Clock) -> dict[str, Any]:
    """Build, load in float32 and bfloat16, prove and measure."""
    pair = Pair("random-qwen3.5-9b", work / "target", work / "drafter", bundled=False)
    assert pair.drafter is not None
    clock.say("building the target")
    build_target(pair.target, size.target, device)
    clock.say("building the drafter")
    build_drafter(pair.drafter, size.drafter, size.target, device)
    if device != "cpu":
        torch.cuda.empty_cache()
    results: dict[str, Any] = {"note": RANDOM, "proofs": [], "load_s": {}, "peak_bytes": {}}
    for dtype, prompts, tokens in (
        ("float32", size.exact_prompts, size.exact_tokens),
        ("bfloat16", size.fast_prompts, size.fast_tokens),
    ):
        clock.say(f"loading in {dtype}")
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        before = time.perf_counter()
        session = load(pair, LoadConfig(dtype=dtype, device=device, engine="reference"))
        results["load_s"][dtype] = time.perf_counter() - before
        results["head"] = report.header("random Qwen3.5-9B", pair, session.facts)
        results["logit_std"] = logit_spread(session)
        if dtype == "bfloat16":
            results["times"] = clock.attempt("timing", lambda s=session: measure(s, size))
        plans = {True: plan_of(session, prompts, tokens), False: plan_of(session, prompts[:1], tokens // 3)}
        for planted, plan in plans.items():
            name = f"proof in {dtype}, {'planted' if planted else 'random'} drafter"
            results["proofs"].append(clock.attempt(name, lambda s=session, p=plan, x=planted: prove(s, p, x)))
        if device != "cpu":
            results["peak_bytes"][dtype] = torch.cuda.max_memory_allocated()
        session.close()
        del session
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    results["proofs"] = [proof for proof in results["proofs"] if proof]
    results["elapsed_s"] = clock.elapsed_s
    return results


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The table."""
    head = results["head"]
    gpus = ", ".join(gpu["name"] for gpu in head["machine"]["gpus"]) or "CPU"
    yield f"random-weight Qwen3.5-9B shape on {gpus}; {RANDOM}"
    yield f"torch {head['versions']['torch']}, transformers {head['versions']['transformers']}, " + (
        f"logits' standard deviation {results['logit_std']:.2f}"
    )
    rows = [
        (
            proof["dtype"],
            proof["drafter"],
            f"{proof['mean_acceptance_length'] or 0:.2f}",
            proof["verdict"],
            f"{proof['noise']['measured']:.2g}",
            f"{proof['plain']['max_margin']:.2g}",
            f"{proof['wall_s']:.0f}",
        )
        for proof in results["proofs"]
    ]
    yield from report.table(("dtype", "drafter", "accepted", "verdict", "noise", "plain margin", "s"), rows)
    yield from (f"  {proof['dtype']}, {proof['drafter']}: {proof['statement']}" for proof in results["proofs"])
    times = results.get("times")
    if times:
        yield f"bfloat16, context {times['context']}, medians, device idle at both ends of each cycle:"
        yield f"  AR step {times['ar_step_ms']:.1f} ms ({times['ar_steps']} steps)"
        for name in ("random_drafter", "planted_drafter"):
            found = times[name]
            yield (
                f"  DFlash cycle, {name.replace('_', ' ')}: {found['cycle_ms']:.1f} ms (draft {found['draft_ms']:.1f}, "
                f"verify {found['verify_ms']:.1f}), acceptance length {found['acceptance_length']:.2f}, "
                f"{found['cycles']} cycles"
            )
    for dtype, peak in results["peak_bytes"].items():
        yield f"peak memory {dtype}: {peak / 2**30:.1f} GiB"
    yield f"{results['elapsed_s']:.0f} s in all"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON report")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints (25 GB)")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on the CPU, in seconds")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="start nothing after S seconds")
    args = parser.parse_args(arguments)
    results = run(SMALL if args.tiny else FULL, args.work, "cpu" if args.tiny else "cuda", Clock(args.budget))
    write_atomic(args.out / "random_qwen35_9b.json", json.dumps(results, indent=1) + "\n", 0o644)
    print("\n".join(lines(results)))
    if not args.keep:
        for part in ("target", "drafter"):
            shutil.rmtree(args.work / part)
    return 1 if any(proof["verdict"] == "BUG" for proof in results["proofs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
