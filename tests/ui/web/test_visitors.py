"""Windows of the page: one that comes back keeps what it had, one that stays away is forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.service.service import Service
from tests.service.scripted import ScriptedSession


def test_a_window_that_came_back_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.ui.web import visitors

    monkeypatch.setattr(visitors, "KEEP_S", -1.0)  # one that has left is forgotten as soon as anybody comes
    window: Any = SimpleNamespace(session_hash="window")
    other: Any = SimpleNamespace(session_hash="other")
    with Service.over(ScriptedSession()) as service:
        everyone = visitors.Visitors(service)
        visitor = everyone.of(window)
        everyone.leave(window)
        assert everyone.of(window) is everyone.of(window) is visitor
        everyone.leave(window)
        everyone.of(other)
        assert everyone.of(window) is not visitor
