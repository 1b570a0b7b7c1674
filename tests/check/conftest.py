"""Sound files that a test may change, and checks of few tokens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_local.catalog import bundled
from dflash_local.engine import load
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig


@pytest.fixture
def demo() -> Iterator[Session]:
    """The bundled pair, loaded."""
    session = load(bundled.find("demo"), LoadConfig(device="cpu", dtype="float32"))
    yield session
    session.close()


@pytest.fixture
def own_toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled pairs as files that a test may change."""
    folder = tmp_path / "toys"
    shutil.copytree(bundled.FOLDER, folder)
    monkeypatch.setattr(bundled, "FOLDER", folder)
    return folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer prompts, and fewer tokens of each reply."""
    from dflash_local.check import drafting, first_cycles, run, text

    monkeypatch.setattr(text, "PROMPTS", 2)
    monkeypatch.setattr(drafting, "TOKENS", 24)
    monkeypatch.setattr(run, "TOKENS", 6)
    monkeypatch.setattr(first_cycles, "PARTS", 1)
    monkeypatch.setattr(first_cycles, "REPLY", 24)
