"""Quantised drafters on a card: the few-row kernels multiply their codes inside the cycle's graph."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.fused import FusedRunner
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask
from tests.quantised_checkpoints import CODED, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dialect", ["pack_quantized", "pack_quantized_8", "fp8", "nvfp4_pack_quantized"])
@pytest.mark.parametrize("pair", ["qwen3-v1-b8", "qwen3-dflash2-b8"])
def test_a_text_drafted_by_codes_is_the_plain_one(pair: str, dialect: str, dtype: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / pair / "drafter", tmp_path / "twin")
    quantise(tmp_path / "twin", tmp_path / "drafter", dialect, coded=(*CODED, "fc"))
    files = find(str(GOLDEN / pair / "target"), str(tmp_path / "drafter"))
    # In bfloat16 a block may round otherwise than a step: exact mode does not.
    session = load(files, LoadConfig(dtype=dtype, device="cuda", engine="fused", exact=dtype == "bfloat16"))
    proposer = cast(FusedRunner, session.runner).proposer
    assert proposer is not None
    assert sum(not isinstance(product.weight, torch.Tensor) for product in proposer.matrices) == 10
    accepted = 0
    for number, case in enumerate(json.loads((GOLDEN / pair / "expected.json").read_text())["cases"][:3]):
        for sampling in (SamplingParams(), SamplingParams(temperature=0.9, seed=number)):
            want = ask(session, case["prompt_ids"], 40, sampling=sampling, mode="ar").ids
            reply = ask(session, case["prompt_ids"], 40, sampling=sampling)
            assert reply.ids == want
            accepted += sum(length - 1 for length in reply.finished.stats.acceptance_lengths)
    assert accepted > 10, "drafts that are hardly ever accepted prove little"
