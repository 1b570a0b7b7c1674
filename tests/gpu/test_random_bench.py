"""``dflash bench --weights random`` on a GPU: graphs are replayed, the report names the card, memory is given back."""

from __future__ import annotations

import gc

import pytest
import torch

from dflash_local.bench import random_report, random_run
from dflash_local.bench.baselines import run_one, tasks
from dflash_local.bench.random_run import Measures
from tests.bench.shapes import tiny_pair

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_tiny_pair_is_measured_by_replays(hybrid: bool) -> None:
    pair, measures, place = tiny_pair(hybrid), Measures((100, 300), (1, 4, 8), 64), random_run.gpu("auto", "auto")
    random_run.measure(pair, measures, place, lambda _text, _part: None)  # makes what all products of a process share
    gc.collect()
    before = torch.cuda.memory_allocated()
    found = random_run.measure(pair, measures, place, lambda _text, _part: None)
    gc.collect()
    assert place.dtype == torch.bfloat16 and found.peak is not None and found.peak > before
    assert torch.cuda.memory_allocated() == before, "baselines need the memory"
    for at in found.at:
        assert all(one.ms > 0 for one in (at.step, at.draft, at.inject, *at.verify.values(), *at.cycle.values()))
    stated = random_report.assumption((), (), 8)
    report = random_report.random_report(pair, measures, place, found, stated, ())
    assert report["card"] == torch.cuda.get_device_name() == report["machine"]["gpus"][0]["name"]
    assert "CUDA graph replays" in " ".join(random_report.random_lines(pair, measures, place, found, stated, ()))


@pytest.mark.parametrize("kind", ["eager", "compiled", "reference"])
def test_a_baseline_answers_or_says_why(kind: str) -> None:
    task = next(task for task in tasks(tiny_pair(), 100, random_run.gpu("auto", "auto")) if task.kind == kind)
    found = run_one(task, 200)
    assert (found.step_ms is None) == bool(found.reason)
    assert kind == "compiled" or found.reason == ""
