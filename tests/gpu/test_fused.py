"""The fused engine on a GPU: equal to the reference engine, graphs equal to eager launches, no host in the way."""

from __future__ import annotations

import pytest
import torch

from dflash_local.catalog import bundled
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.graphs import Graphs
from dflash_local.engine.load_pair import load
from dflash_local.engine.oracle_drafter import OracleDrafter
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.request import SamplingParams
from tests.engine_sessions import random_prompt
from tests.fused_models import fused_target
from tests.recorded_log import record

pytestmark = pytest.mark.gpu
PAIRS = pytest.mark.parametrize("pair", ["demo", "demo-hybrid"])


def session_of(pair: str, engine: str) -> Session:
    return load(bundled.find(pair), LoadConfig(dtype="float32", device="cuda", engine=engine))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_two_hundred_replayed_cycles_equal_eager_ones(family: str) -> None:
    prompt, new = random_prompt(15), 900
    target = fused_target(family, new + 100, device="cuda")
    plain = FusedRunner(target, None, new + 50)
    record(plain, prompt, new, 1)
    found = []
    for on_gpu in (True, False):
        runner = FusedRunner(target, OracleDrafter(target, plain.ids), new + 50)  # type: ignore[arg-type]
        runner._graphs = Graphs(on_gpu)
        _, rows, lengths = record(runner, prompt, new, target.rows)
        assert len(lengths) >= 200 and len(set(lengths)) > 4
        found.append((list(runner.ids), lengths, rows))
    (ids, lengths, rows), (eager_ids, eager_lengths, eager_rows) = found
    assert ids == eager_ids and lengths == eager_lengths
    for index, recorded in rows.items():
        for one, two in zip(recorded, eager_rows[index], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@PAIRS
def test_no_cycle_waits_for_the_device(pair: str) -> None:
    session = session_of(pair, "fused")
    runner, prompt = session.runner, random_prompt(9)
    sampler = Sampler(SamplingParams(), 1, runner.target.vocab_size, torch.tensor(prompt, device="cuda"))
    runner.begin(sampler, frozenset(), session.facts.block_size, True)
    with torch.inference_mode():
        for _ in runner.prefill(prompt, 0):
            pass
        for _ in range(4):  # the first runs compile and record
            runner.launch()
        try:
            torch.cuda.set_sync_debug_mode("error")
            cycles = []
            for _ in range(100):
                runner.launch()
                cycles += runner.collect()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(cycles) >= 100
