"""The commands are a way in here, too: their fixture."""

from __future__ import annotations

from tests.cli.conftest import cli  # noqa: F401
