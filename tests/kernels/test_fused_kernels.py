"""The Triton kernels of the fused engine: equal to their references, and within every card's shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_cards import SHARED_MEMORY, TRITON_CARDS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXACT = ("choice", "acceptance", "committed bits", "decode")  # ids, counts, differences of none, and bits
TOLERANCE = 1e-5
# Of these cards every kernel is compiled by the long tests, and few or none of them here: 86 has the instructions of 80
# and 89 and less shared memory, 90 and 120 the bytes that 89 reads as numbers.
FEW, LIKE_ANOTHER = (86, 120), (80, 89)
LIMIT_S = 600  # Triton works on one core; on a busy one it takes a minute


def child(script: str, *words: str, **environ: str) -> str:
    """The output of a script in a process of its own."""
    pytest.importorskip("triton", reason="triton is not installed here")
    found = subprocess.run(
        [sys.executable, str(HERE / script), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environ},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if "only 0-dimensional arrays can be converted" in found.stderr:
        pytest.skip("this Triton's interpreter does not work with this numpy")
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.timeout(LIMIT_S)
def test_every_kernel_equals_its_reference_in_the_interpreter() -> None:
    found = json.loads(child("interpreted.py", TRITON_INTERPRET="1"))
    assert len(found) > 20
    for name, error in found.items():
        scale = 20 if name.startswith("products") else 1  # sums of 64 products of numbers around one, then multiplied
        assert error <= (0.0 if name.startswith(EXACT) else scale * TOLERANCE), (name, error)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("card", "kernels"),
    [
        *((card, "few") for card in FEW),
        *(
            pytest.param(card, "all", marks=pytest.mark.slow if card in (*FEW, *LIKE_ANOTHER) else ())
            for card in TRITON_CARDS
        ),
    ],
)
def test_kernels_compile_for_every_card_within_its_shared_memory(card: int, kernels: str) -> None:
    """Ahead of time, without a GPU: what was tuned on one card must not fail on another."""
    found = json.loads(child("compiled.py", kernels, str(card)))
    assert len(found) > (12 if kernels == "few" else 20) and {entry["card"] for entry in found} == {card}
    for entry in found:
        assert entry["shared"] <= SHARED_MEMORY[card] * 1024, entry
