"""From an empty machine: a pair whose own weights do not fit is chatted with in a published quantised form, no option
typed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
from dflash_local.app import recommending  # noqa: E402
from dflash_local.catalog import bundled, shapes  # noqa: E402
from dflash_local.planner.machine import named  # noqa: E402
from tests.cli.conftest import DRAFTER, OVERLAY, TARGET, Cli, write_overlay  # noqa: E402
from tests.fake_hub import FakeHub  # noqa: E402
from tests.quantised_checkpoints import quantise  # noqa: E402

VARIANT = "toys/Toy-9B-GPTQ-Int4"
CARD = named(None, 8)  # of Qwen3-8B only four bits fit


@pytest.fixture
def variant(toy_hub: FakeHub, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published GPTQ of the toy's target, listed in a row of the registry, whose shapes are those of Qwen3-8B."""
    plain = tmp_path / "plain"
    shutil.copytree(bundled.FOLDER / "demo" / "target", plain)
    quantise(plain, tmp_path / "gptq", "gptq")
    toy_hub.add_folder(VARIANT, tmp_path / "gptq")
    row = f"{{repo: {VARIANT}, format: gptq-int4, group_size: 128, kept_16_bits: [], size_gib: 0.01}}"
    write_overlay(own_home, f"{OVERLAY}    variants:\n      - {row}\n")
    real = shapes.shape
    stands_for = {TARGET: "Qwen/Qwen3-8B", DRAFTER: "z-lab/Qwen3-8B-DFlash-b16"}
    monkeypatch.setattr(shapes, "shape", lambda repo: real(stands_for.get(str(repo), str(repo))))
    monkeypatch.setattr(recommending, "machine", lambda user, device: CARD)


def test_a_pair_that_fits_only_quantised_is_chatted_with_and_no_option_typed(
    cli: Cli, variant: None, answers: Callable[..., list[str]]
) -> None:
    asked = answers(True, True)
    found = cli("chat", "toy-9b", "--context", "256", "--max-new-tokens", "8", stdin="one two three\n")
    assert found.code == 0 and found.out.strip(), found.err
    assert f"{VARIANT} (published in 4 bits) is taken: toys/Toy-9B in bfloat16 needs" in " ".join(found.err.split())
    assert f"talking to {VARIANT}" in found.err and asked and VARIANT in asked[0]
    assert "licence       unknown" in found.err and "free for" in found.err
    again = cli("chat", "toy-9b", "--context", "256", "--max-new-tokens", "8", stdin="one two three\n")
    assert again.code == 0 and again.out == found.out and len(asked) == 1, "nothing is downloaded twice"
