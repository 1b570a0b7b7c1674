"""A home that no program outlives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.programs import until_all_ended
from tests.ui.web.conftest import profile, visitor  # noqa: F401  (the browser of the page's own tests)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of every program of a test; none may be left."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DFLASH_IN_PROCESS")
    yield tmp_path
    until_all_ended(tmp_path)
