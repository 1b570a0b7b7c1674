"""A toy pair whose target is stored quantised, loaded and drafted for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.request import Limits, SamplingParams, user_request
from tests.engine_sessions import Reply
from tests.quantised_checkpoints import quantise

# A bundled pair, how its target is quantised, and how that is called.
STORED = (
    ("demo", "pack_quantized_zeros", "int4 g32 with zeros"),
    ("demo-hybrid", "gptq", "int4 g32"),
    ("demo-hybrid", "fp8", "fp8 32x32"),
    ("demo-hybrid", "modelopt_nvfp4", "nvfp4"),
    ("demo", "int_quantized", "int8 per channel"),
)


def check_text_of_decoded_weights(name: str, dialect: str, stored: str, device: str, folder: Path) -> None:
    """Both engines, drafted for, write what the reference engine writes over the decoded weights by itself."""
    plain = LoadConfig(device=device, dtype="float32", context=256)
    pair, twin, quantised = find(name), folder / "twin", folder / "quantised"
    shutil.copytree(pair.target, twin)
    quantise(twin, quantised, dialect)
    wanted = load(replace(pair, target=twin, bundled=False), replace(plain, engine="reference"))
    request = user_request("Count from 3 to 12.", sampling=SamplingParams(), limits=Limits(max_new_tokens=24))
    want = Reply(list(wanted.generate(replace(request, mode="ar"))))
    for engine in ("fused", "reference"):
        session = load(replace(pair, target=quantised, bundled=False), replace(plain, engine=engine))
        found = Reply(list(session.generate(replace(request, mode="dflash"))))
        assert found.ids == want.ids
        assert (found.finished.stats.mean_acceptance_length or 0) > 2, "the drafter still knows its target"
        kept = f"fused {stored}" if engine == "fused" else "reference"
        told = any("activations in 4 bits" in notice for notice in session.facts.notices)
        assert told == (stored == "nvfp4"), "which servers have, and this program has not"
        assert session.facts.loaded_as.startswith(f"{kept} float32 {device}")
