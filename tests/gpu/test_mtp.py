"""A target's own layer drafting on a GPU: what its kernels propose, and strict mode writes the plain text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dflash_local.bench.trial import write
from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load, scheduler
from dflash_local.engine.cycle_records import CycleKey
from dflash_local.engine.sampling import Sampler
from dflash_local.request import Limits, SamplingParams, user_request
from tests.engine.test_own_layer import AnyChoice
from tests.engine_sessions import ask, random_prompt
from tests.mtp_checkpoints import own_pair, save_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
PROMPT = random_prompt(24)
HOT = SamplingParams(temperature=0.8, seed=3)
SIX = {"mtp_block_size": 6}
SIZES: dict[str, dict[str, int]] = {"qwen3_5": {}, "qwen3_5_moe": EXPERTS}


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "dtype", "least"),
    [("qwen3_5", "float32", 5.0), ("qwen3_5_moe", "bfloat16", 3.0)],  # in bfloat16 some choices are others
    ids=["dense", "mixture"],
)
def test_recorded_drafts_are_those_of_the_reference_engine(
    family: str, dtype: str, least: float, sampling: SamplingParams, tmp_path: Path
) -> None:
    pair = own_pair(save_target(family, tmp_path / "target", SIX, **SIZES[family]))
    one = cast(Any, load(pair, LoadConfig(dtype="float32", device="cpu", engine="reference")).runner)
    two = cast(Any, load(pair, LoadConfig(dtype=dtype, device="cuda", engine="fused")).runner)
    noises, equal, rows, anchors = [], 0, 6, range(5, 45)
    for runner in (one, two):
        sampler = Sampler(sampling, 11, runner.vocab_size, torch.tensor(PROMPT, device=runner.device))
        noises.append(sampler.noise(len(PROMPT) + 1, rows - 1))
        runner.begin(sampler, frozenset(), rows, True)
        with torch.inference_mode():
            list(runner.prefill(PROMPT, 0))
    key = CycleKey(rows, rows - 1, True, not sampling.greedy, two.target.bucket(64))
    for anchor in anchors:
        two.set_tokens([anchor])
        with torch.inference_mode():
            two._graphs.run(("draft", key), lambda: two.draft(key))
            expected = one.proposer.propose([*PROMPT, anchor], rows - 1, sampler, noises[0])
        same = (two.progress.tokens[1:rows].cpu() == expected.ids).long().cumprod(0).bool()
        equal += int(same.sum())
        if dtype == "float32":
            margins = two.progress.margins[: rows - 1].cpu()
            torch.testing.assert_close(margins[same], expected.confidences[same], atol=2e-2, rtol=2e-2)
    assert equal >= least * len(anchors)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_no_text_changes(family: str, tmp_path: Path) -> None:
    folder = save_target(family, tmp_path / "target", SIX, **SIZES[family])
    session = load(own_pair(folder), LoadConfig(dtype="bfloat16", device="cuda", engine="fused", exact=True))
    for sampling in (SamplingParams(), HOT, replace(HOT, top_p=0.9, repetition_penalty=1.2)):
        plain = ask(session, PROMPT, 200, sampling=sampling, mode="ar")
        for block in (None, 2, 4, 6):
            assert ask(session, PROMPT, 200, sampling=sampling, block_size=block).ids == plain.ids


def test_beside_a_drafter_whoever_drafts_writes_the_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bundled pair, strict; and what each one's cycles cost is measured."""
    session = load(find("demo-hybrid"), LoadConfig(device="cuda", engine="fused", exact=True, mtp=True))
    assert set(session.runner.own_costs) == {1, 2, 3, 4, 5} and 8 in session.runner.costs
    monkeypatch.setattr(scheduler, "DrafterChoice", AnyChoice)
    mtp = drafted = 0
    for prompt in ("Count from 3 to 17.", 'Spell the word "bridge" with dashes.'):
        for sampling in (SamplingParams(), HOT, replace(HOT, top_p=0.9)):
            asked = user_request(prompt, sampling=sampling, limits=Limits(60))
            reply = write(session, replace(asked, mode="dflash"))
            assert reply.ids == write(session, replace(asked, mode="ar")).ids
            mtp, drafted = mtp + reply.stats.mtp_cycles, drafted + len(reply.stats.acceptance_lengths)
    assert 5 < mtp < drafted - 5
