"""A card is rehearsed on an H100 by its own code alone, in child processes, too; here by what is compiled for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local.kernels import nvrtc
from tests.gpu.rehearsal import CARDS
from tests.kernels.test_fused_kernels import child


@pytest.mark.parametrize("name", ["RTX 4090", pytest.param("RTX 3090", marks=pytest.mark.slow)])
def test_every_compiler_makes_what_the_card_would_run(compiler: nvrtc.Nvrtc, name: str, tmp_path: Path) -> None:
    found, card = child("rehearsed.py", name, str(tmp_path)), CARDS[name]
    capability, target = [card.major, card.minor], f"sm_{card.major}{card.minor}"
    assert found["name"] == f"{name} rehearsed on NVIDIA H100 80GB HBM3" and found["memory"] == 80 * 2**30
    assert found["properties"] == [101_376, card.multi_processor_count, capability, card.L2_cache_size]
    assert found["capability"] == capability and found["overlaps"] is False
    assert found["triton"] == [target, True] and found["nvrtc"] == target and found["children"] == [target, target]
    assert all(" is not a kernel of the " in why for why in found["refused"]) and found["counts"] == {"refused": 3}
    assert found["smi"] == f"0, {name} rehearsed on NVIDIA H100 80GB HBM3, {card.major}.{card.minor}\n"
