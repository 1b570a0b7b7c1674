"""Cycles of any drafter, any length and any cut, copies between them, on a GPU: strict mode writes the plain text."""

from __future__ import annotations

import random

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load, scheduler
from dflash_local.events import Step
from dflash_local.request import SamplingParams
from tests.engine.test_lookup import Foreseen
from tests.engine.test_own_layer import AnyChoice
from tests.engine_sessions import ask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CYCLES, SAID, CONTEXT = 20_000, 400, 1024


def test_no_text_changes_in_thousands_of_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "DrafterChoice", AnyChoice)
    session = load(
        find("demo-hybrid"), LoadConfig(device="cuda", exact=True, mtp=True, context=CONTEXT, cache_memory=0.0)
    )
    session.stop_ids = frozenset()  # replies of the whole length: what is tried are cycles
    draw, steps = random.Random(11), list[Step]()
    while len(steps) < CYCLES:
        prompt = [draw.randrange(5, 90) for _ in range(draw.randrange(4, 500))]
        sampling = SamplingParams(temperature=draw.choice((0.0, 0.5, 1.0, 1.5)), seed=draw.randrange(99))
        plain = ask(session, prompt, SAID, sampling=sampling, mode="ar")
        session.conversations.index = Foreseen((*prompt, *plain.ids))
        session.schedulers.clear()
        drafted = ask(session, prompt, SAID, sampling=sampling)
        assert drafted.ids == plain.ids
        steps += [step for step in drafted.find(Step) if step.drafted]
    session.close()
    for kind in ("copied", "mtp"):
        assert sum(getattr(step, kind) for step in steps) > CYCLES / 20
    assert sum(not step.copied and not step.mtp for step in steps) > CYCLES / 20
