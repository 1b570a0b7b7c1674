"""From an empty machine: a pair whose own weights do not fit is chatted with in a published quantised form, no option
typed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
from dflash_local.app import download, recommending  # noqa: E402
from dflash_local.app.resolve import choose  # noqa: E402
from dflash_local.catalog import registry, shapes  # noqa: E402
from dflash_local.cli import fetch  # noqa: E402
from dflash_local.planner.machine import named  # noqa: E402
from dflash_local.planner.speed import acceptance  # noqa: E402
from dflash_local.settings import load as load_settings  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402
from tests.fake_hub import FakeHub  # noqa: E402
from tests.toy_variant import CARD_GIB, STANDS_FOR, TARGET, VARIANT, publish_variant  # noqa: E402


@pytest.fixture
def variant(toy_hub: FakeHub, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the toy's target, on a machine of which the plans see a small card."""
    publish_variant(toy_hub, own_home, tmp_path)
    real, card = shapes.shape, named(None, CARD_GIB)
    monkeypatch.setattr(shapes, "shape", lambda repo: real(STANDS_FOR.get(str(repo), str(repo))))
    for room in (recommending, download):
        monkeypatch.setattr(room, "machine", lambda user, device="auto": card)


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


def test_pull_fetches_the_variant_that_fits_and_its_last_line_chats(cli: Cli, variant: None) -> None:
    pulled = cli("pull", "toy-9b", "--yes")
    assert pulled.code == 0 and f"{VARIANT} (published in 4 bits, KV cache in 8 bits) is taken" in " ".join(
        pulled.err.split()
    )
    assert f"{VARIANT}: " in pulled.out and f"{TARGET}: " not in pulled.out
    command = pulled.out.strip().splitlines()[-1].removeprefix("next: dflash ").split()
    found = cli(*command, "--context", "256", "--max-new-tokens", "8", stdin="one two three\n")
    assert found.code == 0 and found.out.strip() and "Download" not in found.err


def test_pull_takes_the_own_weights_by_force(cli: Cli, variant: None) -> None:
    pulled = cli("pull", "toy-9b", "--yes", "--force", "--dry-run")
    assert pulled.code == 0 and TARGET in pulled.out and VARIANT not in pulled.out


def test_before_a_download_stand_the_card_s_acceptance_lengths(monkeypatch: pytest.MonkeyPatch, toys: Path) -> None:
    user = load_settings()
    monkeypatch.setattr(fetch, "machine", lambda _user: named("NVIDIA H200", 140))
    shown = " ".join(" ".join(fetch._before_download(choose("qwen3.5-9b", None, user), user, 100)).split())
    row = registry.load().find("qwen3.5-9b")
    assert row is not None
    found = acceptance(row.published, 16)
    assert found is not None and f"{found.low:g} to {found.high:g}" in shown, shown
