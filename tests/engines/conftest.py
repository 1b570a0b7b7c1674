"""The commands are a way in here, too: their fixture, and what makes them launch the real vLLM on a CPU."""

from __future__ import annotations

import pytest

from tests.cli.conftest import cli  # noqa: F401
from tests.engines.test_vllm import ON_A_CPU, VARIABLES


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of a command that launches its server."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return "--engine", "vllm", "--engine-args", " ".join(ON_A_CPU)
