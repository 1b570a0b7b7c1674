"""The Triton kernels of the fused engine: equal to their references, and within every card's shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_local.kernels.jit import rows_of_program
from tests.cuda_cards import SHARED_MEMORY, TRITON_CARDS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXACT = ("choice", "acceptance", "committed bits", "decode", "bits of")  # ids, counts, differences of none, and bits
TOLERANCE = 1e-5
# Here for a card with the least shared memory that also reads eight-bit caches as numbers; for the other cards, and in
# every shape, by the long tests.
HERE_TOO = (89, "each")
LIMIT_S = 600  # Triton works on one core; on a busy one it takes a minute


def child(script: str, *words: str, **environ: str) -> Any:
    """Run a script in a process of its own, and return the JSON that it prints."""
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
    return json.loads(found.stdout)


@pytest.mark.timeout(LIMIT_S)
def test_every_kernel_equals_its_reference_in_the_interpreter() -> None:
    """Also bit by bit: rows of every size in a cache of codes, and a row at other indices, among others, under
    another max_seq_len.
    """
    found = child("interpreted.py", TRITON_INTERPRET="1")
    assert len(found["close"]) > 90 and len(found["bits"]) > 30 and len(found["chunks"]) > 8
    for name, error in found["close"].items():
        # Sums of 64 products of numbers around one, then multiplied; or of 700.
        scale = 20 if name.startswith(("products", "margins")) else 1
        assert error <= (0.0 if name.startswith(EXACT) else scale * TOLERANCE), (name, error)
    assert {name: wrong for name, wrong in found["bits"].items() if wrong} == {}
    for name, error in found["chunks"].items():
        # Two pieces hold 16 bits where they are cut off and not rounded, as the interpreter does it.
        assert error <= (1e-4 if name.endswith("bf16x2") else TOLERANCE), (name, error)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("card", "kernels"), [HERE_TOO, *(pytest.param(card, "all", marks=pytest.mark.slow) for card in TRITON_CARDS)]
)
def test_kernels_compile_for_every_card_within_its_shared_memory(card: int, kernels: str) -> None:
    """Ahead of time, without a GPU: what was tuned on one card must not fail on another."""
    found = child("compiled.py", kernels, str(card))
    assert len(found) > 20 and {entry["card"] for entry in found} == {card}
    for entry in found:
        assert entry["shared"] <= SHARED_MEMORY[card] * 1024, entry


def test_kernels_can_be_imported_where_triton_is_not_installed() -> None:
    script = (
        "import importlib, pkgutil, sys; sys.modules['triton'] = None; import dflash_local.kernels as kernels\n"
        "for each in pkgutil.iter_modules(kernels.__path__): importlib.import_module(f'{kernels.__name__}.{each.name}')"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert found.returncode == 0, found.stderr[-2000:]


def test_a_program_takes_several_rows_of_many_and_one_of_a_few() -> None:
    assert [rows_of_program(*sizes) for sizes in ((64, 128), (65, 128), (9000, 256), (9000, 4096))] == [
        (1, 1),
        (16, 4),
        (8, 4),
        (1, 4),
    ]
