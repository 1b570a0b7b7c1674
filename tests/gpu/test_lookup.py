"""Drafts that are copied from the text, on a GPU: strict mode writes the plain text, whatever is verified of them."""

from __future__ import annotations

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.drafters.kinds import LOOKUP, folder_of
from dflash_local.engine import LoadConfig, load
from tests.engine.test_lookup import REPEATED, SAMPLINGS, asked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_no_text_changes(model: str) -> None:
    session = load(find(model, str(folder_of(LOOKUP))), LoadConfig(device="cuda", dtype="bfloat16", exact=True))
    assert session.facts.engine == "fused" and session.runner.costs
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
    assert accepted["greedy"] > 0 and accepted["sampled"] > 0
