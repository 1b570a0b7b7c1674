"""What ``dflash chat`` without MODEL offers to somebody who has a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app import fitting
from dflash_local.app.offers import offers
from dflash_local.catalog import bundled
from dflash_local.catalog.shapes import shape
from dflash_local.cli.console import Console
from dflash_local.planner.machine import named
from tests.app.test_fine_tune import GGUF, snapshot
from tests.cli.conftest import Cli, Opened, write_overlay
from tests.fake_hub import safetensors
from tests.fake_pip import fake_pip
from tests.smollm2 import in_package, with_drafter

CARD = named("RTX 4090", 24.0)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def offered() -> dict[str, str]:
    return {offer.model: offer.text for offer in offers(settings.load(), CARD)}


def put_here(home: Path, repo: str) -> None:
    folder = snapshot(home, repo, {"config.json": json.dumps(shape(repo))})
    (folder / "model.safetensors").write_bytes(safetensors(64))


def test_the_largest_pair_that_fits_with_its_download_and_the_small_one(
    online: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_drafter(tmp_path / "own", monkeypatch)
    with monkeypatch.context() as without:
        without.setattr(bundled, "FOLDER", tmp_path)
        assert len(offered()) == 1, "an installation without its drafter offers no small pair"
    (picked, why), small = offered().items()
    assert why.startswith("the largest that fits: ") and "GiB to download, about" in why and "100 Mbit/s" in why
    assert "tokens of context" in why and "tokens/s" in why and "B" in picked
    assert small == ("smollm2", "try now: a small real model, 88.6 MiB to download")


def test_what_is_on_this_disk_comes_first(online: None, own_home: Path) -> None:
    put_here(own_home, "Qwen/Qwen3-8B")
    put_here(own_home, "z-lab/Qwen3-8B-DFlash-b16")
    first, second, _small = offered().items()
    assert first[0] == "Qwen/Qwen3-8B" and first[1].startswith("on this disk, fits")
    assert second[1].startswith("the largest that fits")


def test_gguf_files_with_a_drafter_are_offered_and_others_are_not(own_home: Path) -> None:
    write_overlay(own_home, "schema: 1\npairs:\n  - {target: tiny/Llama-7, drafter: tiny/Llama-7-DFlash}\n")
    snapshot(own_home, "tiny/Llama-7", {"config.json": (GGUF / "llama" / "config.json").read_text(encoding="utf-8")})
    drafter = {**json.loads((GGUF.parent / "llama31-v1-b10" / "drafter" / "config.json").read_text(encoding="utf-8"))}
    snapshot(own_home, "tiny/Llama-7-DFlash", {"config.json": json.dumps(drafter)})
    folder = own_home / ".lmstudio" / "models" / "a" / "b"
    folder.mkdir(parents=True)
    shutil.copy(GGUF / "llama.gguf", folder / "mine.gguf")
    shutil.copy(GGUF / "qwen3.gguf", folder / "stranger.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (offer,) = offers(settings.load(), CARD)
    assert offer.model == str(folder / "mine.gguf")
    assert offer.text.startswith("mine of LM Studio, 0.1 MiB, its drafter unknown to download, fits")


def test_offline_nothing_is_offered_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_drafter(tmp_path / "own", monkeypatch)
    assert offered() == {}


def test_chat_asks_somebody_with_a_card_and_nobody_else(
    cli: Cli,
    opened: Opened,
    online: None,
    own_home: Path,
    tmp_path: Path,
    answers: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    pip = fake_pip(tmp_path / "pip", monkeypatch)
    write_overlay(own_home, in_package(pip))
    pip.act(says="ERROR: no route")

    def choose(self: Console, count: int) -> int:
        chosen.append(count)
        return count

    answers()
    monkeypatch.setattr(Console, "choose", choose)
    with_drafter(tmp_path / "own", monkeypatch)
    assert "would run" not in cli("chat", stdin="").err and not chosen, "no card"
    monkeypatch.setattr(fitting, "machine", lambda user, **_more: CARD)
    asked = cli("chat", stdin="")
    assert (
        "no MODEL was given; on RTX 4090" in asked.err and "  1  Qwen/" in asked.err and "  2  smollm2: " in asked.err
    )
    assert chosen == [2] and asked.code == 4 and "pip could not fetch a-model 1.0: no route" in asked.err
    assert "would run" not in cli("chat", "demo", stdin="").err
    monkeypatch.setenv("DFLASH_MODEL", "demo")
    assert "would run" not in cli("chat", stdin="").err and chosen == [2]
