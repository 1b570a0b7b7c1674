"""Drafts that are copied from the text, on a GPU: strict mode writes the plain text, whatever is verified of them."""

from __future__ import annotations

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.drafters.kinds import LOOKUP, folder_of
from dflash_local.engine import LoadConfig, load
from dflash_local.events import Step
from dflash_local.request import user_request
from tests.engine.test_lookup import REPEATED, SAMPLINGS, TEXTS, Foreseen, asked, cycles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STRICT = LoadConfig(device="cuda", dtype="bfloat16", exact=True)


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_no_text_changes(model: str) -> None:
    session = load(find(model, str(folder_of(LOOKUP))), STRICT)
    assert session.facts.engine == "fused" and session.runner.verify_costs and not session.runner.costs
    accepted = dict.fromkeys(SAMPLINGS, 0)
    for how, sampling in SAMPLINGS.items():
        prompt = REPEATED
        for _ in range(3):
            plain = asked(session, "ar", prompt, sampling)
            drafted = asked(session, "dflash", prompt, sampling)
            again = asked(session, "dflash", prompt[:-3], sampling, cold=False)
            assert drafted.ids == plain.ids
            assert again.ids == asked(session, "ar", prompt[:-3], sampling).ids
            accepted[how] += sum(cycle.accepted for cycle in drafted.cycles)
            prompt = (*prompt, *plain.ids, 7, 8, 9)
    session.close()
    assert accepted["greedy"] > 0 or model != "demo", "its replies repeat themselves"


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_no_text_changes_beside_a_drafter(model: str) -> None:
    session, found = load(find(model), STRICT), list[Step]()
    assert set(session.runner.verify_costs) > set(session.runner.costs) > {1}, "strict cycles are all as dear"
    for sampling in SAMPLINGS.values():
        for text in TEXTS:
            prompt = session.render(user_request(text)).ids
            plain = asked(session, "ar", prompt, sampling)
            session.conversations.index = Foreseen((*prompt, *plain.ids))
            session.schedulers.clear()
            found += cycles(session, prompt, sampling, plain)
    session.close()
    assert {step.copied for step in found} == {0, 1}
