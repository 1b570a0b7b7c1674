"""Is the host in the way? Share of decode time the GPU works, and tokens per second beside a busy Python thread.

``PYTHONPATH=. python benchmarks/host_share.py qwen3.5-9b > FILE.json``: one CUDA GPU, random weights of true
shapes. The real drafter runs in every cycle; its drafts are then replaced by the known text with mistakes, so that
cycles accept several tokens and the whole path of a reply is timed; in exact mode, so that the text is the known one.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from dataclasses import replace
from statistics import median

import torch

from benchmarks.random_checkpoint import named_pair
from dflash_local.bench import random_pair
from dflash_local.bench.provenance import machine, versions
from dflash_local.bench.trial import write
from dflash_local.drafters.engines import FusedDrafter
from dflash_local.engine.costs import measure_costs
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import Limits, Request

NEW = 500
RUNS = 3


class Corrected(OracleDrafter):
    """The real drafter's work, and the known text's tokens in place of what comes of it."""

    def __init__(self, real: FusedDrafter, runner: FusedRunner, text: list[int]) -> None:
        super().__init__(runner.target, text)
        self._real = real

    def block(self, max_seq_len: int) -> None:
        self._real.block(max_seq_len)
        super().block(max_seq_len)

    def inject(self, taps: torch.Tensor) -> None:
        self._real.inject(taps)

    def write_context(self, taps: torch.Tensor, ids: torch.Tensor, start: int) -> None:
        self._real.write_context(taps, ids, start)
        super().write_context(taps, ids, start)


def busy(stop: threading.Event) -> None:
    """Pure Python, never waiting."""
    count = 0
    while not stop.is_set():
        for _ in range(1000):
            count += 1


def taken_costs(runner: FusedRunner, block: int) -> dict[int, float]:
    """Measure cycles by verified rows, and leave the runner without them: it would choose its blocks by them."""
    measure_costs(runner, block)
    costs, runner.costs = dict(runner.costs), {}
    return costs


def timed(session: Session, request: Request) -> dict[str, float]:
    """Medians of a few replies alone and beside a busy thread."""
    found: dict[str, float] = {}
    write(session, request)
    for name in ("alone", "beside_a_busy_thread"):
        stop = threading.Event()
        worker = threading.Thread(target=busy, args=(stop,), daemon=True)
        if name != "alone":
            worker.start()
        spans = []
        for _ in range(RUNS):
            written = write(session, request)
            tokens, cycles, seconds = len(written.ids) - 1, len(written.cycles), written.stats.decode_s
            spans.append((tokens / seconds, 1e3 * seconds / cycles))
            found["tokens_per_cycle"] = tokens / cycles
        stop.set()
        found[f"tokens_per_s_{name}"] = median(rate for rate, _ in spans)
        found[f"cycle_wall_ms_{name}"] = median(span for _, span in spans)
    found["kept_beside_a_busy_thread"] = found["tokens_per_s_beside_a_busy_thread"] / found["tokens_per_s_alone"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    pair = named_pair(parser.parse_args().target)
    load = LoadConfig(engine="fused", dtype="bfloat16", device="cuda", context=4096, exact=True)
    runner, chosen = random_pair.build(pair, 4096, torch.device("cuda"), torch.bfloat16, load)
    block = pair.config.block_size
    facts = SessionFacts(pair.target, pair.drafter, block, False, load)
    session = Session(runner, facts, None, frozenset())
    costs = taken_costs(runner, block)
    noise = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(0, runner.target.vocab_size, (1024,), generator=noise).tolist())
    request = Request(prompt_ids=prompt, limits=Limits(NEW), mode="ar")
    plain = timed(session, request)
    text = [*prompt, *write(session, request).ids]
    session.reset()  # the costs are measured on a runner that holds nothing
    runner.proposer = Corrected(runner.proposer, runner, text)  # type: ignore[arg-type]
    corrected = taken_costs(runner, block)
    drafted = timed(session, replace(request, mode="dflash", block_size=block))
    result = {
        "what": "decode through the session, random weights, real drafter's work, planted drafts, exact mode, bf16",
        "pair": [pair.target, pair.drafter],
        "drafter_precision": chosen.name,
        "switch_interval_s": sys.getswitchinterval(),
        "cycle_gpu_ms": costs,
        "cycle_gpu_ms_with_planted_drafts": corrected,
        "ar": plain | {"gpu_busy": costs[1] / plain["cycle_wall_ms_alone"]},
        "dflash": drafted | {"gpu_busy": corrected[block] / drafted["cycle_wall_ms_alone"]},
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
