"""The reference runner on a CUDA device: L1 in float32 on every family, half precision, golden pairs.

Run with `make test-gpu`; skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask, random_prompt
from tests.families import FAMILIES, VOCAB, random_model
from tests.proposers import Oracle, RandomDrafts, decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GOLDEN = Path(__file__).parent.parent / "golden"
NEW = 40
PAIRS = sorted(each.name for each in GOLDEN.iterdir() if (each / "drafter").is_dir())


@pytest.mark.parametrize("family", FAMILIES)
def test_l1_float32_is_identical_on_the_gpu(family: str) -> None:
    target = TransformersTarget(random_model(family).cuda(), (0, 2))
    prompt = random_prompt(11)
    for params in (SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9)):
        text, _ = decode(target, prompt, NEW, params=params)
        for drafter in (Oracle(VOCAB, text), Oracle(VOCAB, text, 5), Oracle(VOCAB, text, 1), RandomDrafts(VOCAB)):
            for block in (2, 8, 16):
                assert decode(target, prompt, NEW, drafter, block, params)[0] == text, f"{drafter} block {block}"


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("pair", PAIRS)
def test_golden_pairs_in_float32_on_the_gpu(pair: str, engine: str) -> None:
    options = LoadConfig(dtype="float32", device="cuda", engine=engine)
    session = load(find(str(GOLDEN / pair / "target"), str(GOLDEN / pair / "drafter")), options)
    assert session.facts.engine == engine
    for case in json.loads((GOLDEN / pair / "expected.json").read_text())["cases"]:
        reply = ask(session, case["prompt_ids"], 72, block_size=session.facts.block_size)
        assert reply.ids == case["output_ids"]
        assert list(reply.finished.stats.acceptance_lengths) == case["acceptance_lengths"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("device", ["balanced", "cuda:1,0"])
@pytest.mark.parametrize("pair", PAIRS)
def test_golden_pairs_spread_over_several_gpus(pair: str, device: str) -> None:
    session = load(
        find(str(GOLDEN / pair / "target"), str(GOLDEN / pair / "drafter")),
        LoadConfig(dtype="float32", device=device, engine="reference"),
    )
    spread = {p.device.index for p in session.runner.target.model.parameters()}
    assert len(spread) > 1 and (device == "balanced" or spread == {0, 1})
    for case in json.loads((GOLDEN / pair / "expected.json").read_text())["cases"][:2]:
        assert ask(session, case["prompt_ids"], 72).ids == case["output_ids"]
