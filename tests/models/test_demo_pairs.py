"""The bundled toys are ordinary and small."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from dflash_local.catalog.bundled import FOLDER

PAIRS = ("demo", "demo-hybrid")


@pytest.mark.parametrize("name", PAIRS)
def test_pair_fits_in_nine_megabytes_of_bfloat16(name: str) -> None:
    assert sum(file.stat().st_size for file in (FOLDER / name).rglob("*") if file.is_file()) <= 9_000_000
    for part in ("target", "drafter"):
        with safe_open(FOLDER / name / part / "model.safetensors", "pt") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118
            assert all(torch.isfinite(weights.get_tensor(key)).all() for key in weights.keys())  # noqa: SIM118
        assert json.loads((FOLDER / name / part / "config.json").read_text())["dtype"] == "bfloat16"
