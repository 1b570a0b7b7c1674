"""Drafter precisions on a GPU: none changes a reply, by the kernels of eight bits and by what stands in for them."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.catalog import bundled
from dflash_local.engine.drafter_precision import choose_precision
from dflash_local.engine.load_pair import load
from dflash_local.kernels.fragment_packing import FragmentWeight
from dflash_local.kernels.quantized_weight import IntWeight
from dflash_local.load_config import DRAFTER_PRECISIONS, LoadConfig
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask, random_prompt

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pair", ["demo", "demo-hybrid"])
@pytest.mark.parametrize(("dtype", "exact"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("word", [word for word, side in DRAFTER_PRECISIONS.items() if side.head != "frequent"])
def test_no_drafter_precision_changes_a_reply(pair: str, word: str, dtype: str, exact: bool) -> None:
    wanted = LoadConfig(dtype=dtype, device="cuda", engine="fused", exact=exact, drafter_precision="full")
    session = load(bundled.find(pair), wanted)
    samplings = (SamplingParams(), SamplingParams(temperature=1.5, seed=5))
    prompt = random_prompt(15)
    want = [ask(session, prompt, 200, sampling=how, mode="ar").ids for how in samplings]
    session.reset()
    runner: Any = session.runner
    runner._graphs.clear()
    drafter = session.runner.proposer
    choose_precision(drafter, word, session.facts.block_size)
    kept = FragmentWeight if dtype == "bfloat16" else IntWeight
    assert {type(matrix.weight) is kept for matrix in drafter.matrices} == {DRAFTER_PRECISIONS[word].weights == "8bit"}
    assert (type(drafter.head.weight) is kept) == (DRAFTER_PRECISIONS[word].head == "8bit")
    assert [ask(session, prompt, 200, sampling=how, mode="dflash").ids for how in samplings] == want
