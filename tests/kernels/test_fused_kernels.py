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
# Here for a card with the least shared memory that also reads eight-bit caches as numbers; for the other cards, and in
# every shape, by the long tests.
HERE_TOO = (89, "each")
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
@pytest.mark.parametrize("checks", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_every_kernel_equals_its_reference_in_the_interpreter(checks: str) -> None:
    """``few``: all but those that go the way of another."""
    found = json.loads(child("interpreted.py", checks, TRITON_INTERPRET="1"))
    assert len(found) > 20
    for name, error in found.items():
        scale = 20 if name.startswith("products") else 1  # sums of 64 products of numbers around one, then multiplied
        assert error <= (0.0 if name.startswith(EXACT) else scale * TOLERANCE), (name, error)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("card", "kernels"),
    [
        HERE_TOO,
        *(pytest.param(card, "all", marks=pytest.mark.slow) for card in TRITON_CARDS),
    ],
)
def test_kernels_compile_for_every_card_within_its_shared_memory(card: int, kernels: str) -> None:
    """Ahead of time, without a GPU: what was tuned on one card must not fail on another."""
    found = json.loads(child("compiled.py", kernels, str(card)))
    assert len(found) > 20 and {entry["card"] for entry in found} == {card}
    for entry in found:
        assert entry["shared"] <= SHARED_MEMORY[card] * 1024, entry
