"""What is known of a pair that is to be served, before it is loaded."""

from __future__ import annotations

import pytest

from dflash_local import settings
from dflash_local.app import model_sources
from dflash_local.app.model_sources import LocalModels
from dflash_local.catalog.bundled import find
from dflash_local.load_config import LoadConfig


@pytest.mark.parametrize(
    ("template", "effort"), [("{{ messages }}{{ reasoning_effort }}", True), ("{{ messages }}", False), (None, False)]
)
def test_an_endpoints_model_tells_what_its_template_takes(
    monkeypatch: pytest.MonkeyPatch, template: str | None, effort: bool
) -> None:
    monkeypatch.setattr(model_sources, "chat_template", lambda _parts: template)
    load = LoadConfig(device="cpu", context=256)
    models = LocalModels(settings.load(), load, lambda _event: None, served=True)
    assert models.model(find("demo"), load, thinking=False).takes_effort is effort
