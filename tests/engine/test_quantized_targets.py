"""Pairs with a quantized target: the text is that of the decoded weights, in both engines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.request import Limits, SamplingParams, user_request
from tests.engine_sessions import Reply
from tests.quantized_checkpoints import quantize_checkpoint

# A bundled pair, how its target is quantized, and how that is called.
STORED = (
    ("demo", "pack_quantized_zeros", "int4 g32 with zeros"),
    ("demo-hybrid", "gptq", "int4 g32"),
    ("demo-hybrid", "fp8", "fp8 32x32"),
    ("demo-hybrid", "modelopt_nvfp4", "nvfp4"),
    ("demo", "int_quantized", "int8 per channel"),
)
# A format of each width with what sets it apart, zeros, blocks or two scales; all of them on a card.
HERE = ("pack_quantized_zeros", "fp8", "modelopt_nvfp4")
CASES = [
    *((*each, "cpu") for each in STORED if each[1] in HERE),
    *(pytest.param(*each, "cuda", marks=pytest.mark.gpu) for each in STORED),
]


@pytest.mark.parametrize(("name", "dialect", "stored", "device"), CASES)
def test_a_quantized_pair_writes_what_its_decoded_weights_write(
    name: str, dialect: str, stored: str, device: str, tmp_path: Path
) -> None:
    plain = LoadConfig(device=device, dtype="float32", context=256)
    pair, twin, quantized = find(name), tmp_path / "twin", tmp_path / "quantized"
    shutil.copytree(pair.target, twin)
    quantize_checkpoint(twin, quantized, dialect)
    wanted = load(replace(pair, target=twin, bundled=False), replace(plain, engine="reference"))
    request = user_request("Count from 3 to 12.", sampling=SamplingParams(), limits=Limits(max_new_tokens=24))
    want = Reply(list(wanted.generate(replace(request, mode="ar"))))
    for engine in ("fused", "reference"):
        session = load(replace(pair, target=quantized, bundled=False), replace(plain, engine=engine))
        found = Reply(list(session.generate(replace(request, mode="dflash"))))
        assert found.ids == want.ids
        assert (found.finished.stats.mean_acceptance_length or 0) > 2, "the drafter still knows its target"
        kept = f"fused {stored}" if engine == "fused" else "reference"
        told = any("activations in 4 bits" in notice for notice in session.facts.notices)
        assert told == (stored == "nvfp4"), "which servers have, and this program has not"
        assert session.facts.loaded_as.startswith(f"{kept} float32 {device}")
