"""The tool that asks the Hub for sizes which the registry lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import TARGET
from tests.fake_hub import FakeHub, online
from tools import registry_sizes

WEIGHTS = 3 * 2**20


@pytest.fixture
def hub(own_home: Path) -> FakeHub:
    found = FakeHub()
    files = {"config.json": b"{}", "model.safetensors": b"\0" * WEIGHTS, "original/model.safetensors": b"\0" * WEIGHTS}
    found.add_repo(TARGET, files)
    return found


def test_a_listing_is_counted_as_a_pull_would_fetch_it(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_sizes, "GIB", 2**20)
    with hub, online(hub):
        registry_sizes.main([TARGET, "nobody/nothing"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{TARGET}: 3.00 GiB at ") and second.startswith("nobody/nothing: ")
    assert "not found" in second and not hub.gets(), "nothing is downloaded"
