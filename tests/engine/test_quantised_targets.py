"""A toy pair whose target is stored quantised, loaded and drafted for: the text is that of the decoded weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from engine_sessions import Reply
from quantised_checkpoints import quantise

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.request import Limits, SamplingParams, user_request

PLAIN = LoadConfig(device="cpu", dtype="float32", context=256)


@pytest.mark.parametrize(
    ("name", "dialect", "stored"),
    [
        ("demo", "pack_quantized_zeros", "int4 g32 with zeros"),
        ("demo-hybrid", "gptq", "int4 g32"),
        ("demo-hybrid", "fp8", "fp8 32x32"),
    ],
)
def test_a_quantised_pair_writes_what_its_decoded_weights_write(
    name: str, dialect: str, stored: str, tmp_path: Path
) -> None:
    pair = find(name)
    twin, folder = tmp_path / "twin", tmp_path / "quantised"
    shutil.copytree(pair.target, twin)
    quantise(twin, folder, dialect)
    wanted = load(replace(pair, target=twin, bundled=False), replace(PLAIN, engine="reference"))
    request = user_request("Count from 3 to 12.", sampling=SamplingParams(), limits=Limits(max_new_tokens=40))
    want = Reply(list(wanted.generate(replace(request, mode="ar"))))
    for engine in ("fused", "reference"):
        session = load(replace(pair, target=folder, bundled=False), replace(PLAIN, engine=engine))
        assert session.facts.engine == engine
        found = Reply(list(session.generate(replace(request, mode="dflash"))))
        assert found.ids == want.ids
        assert (found.finished.stats.mean_acceptance_length or 0) > 2, "the drafter still knows its target"
        assert session.facts.loaded_as == ("fused " + stored if engine == "fused" else "reference") + " float32 cpu"
