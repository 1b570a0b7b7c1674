"""Which repository of a model is taken on a machine that its own weights do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.app import recommending
from dflash_local.app.recommending import suited
from dflash_local.app.resolve import Choice, choose
from dflash_local.catalog.row import Repo
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import named
from dflash_local.settings import Settings, load

AUTOROUND = "Lorbus/Qwen3.6-27B-int4-AutoRound"
AWQ = "cyankiwi/Qwen3.6-27B-AWQ-INT4"


class Store:
    """A machine with some repositories on it."""

    def __init__(self, *complete: str) -> None:
        self.complete = complete

    def find(self, repo: Repo | None) -> Any:
        here = repo is not None and repo.id in self.complete
        return SimpleNamespace(complete=True, folder=Path("nowhere")) if here else None


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(recommending, "machine", lambda user, device: named(None, 24))
    return load()


def taken(choice: Choice, user: Settings, config: LoadConfig, *here: str) -> tuple[Choice, list[str]]:
    told: list[Notice | LoadProgress] = []
    found = suited(config, user, told.append)(choice, Store(*here))  # type: ignore[arg-type]
    return found, [each.message for each in told if isinstance(each, Notice)]


def test_a_published_quantised_target_is_taken_where_the_own_one_does_not_fit(user: Settings) -> None:
    found, told = taken(choose("qwen3.6-27b", None, user), user, LoadConfig())
    assert found.name == AUTOROUND and isinstance(found.target, Repo) and found.target.id == AUTOROUND
    assert found.drafter == choose("qwen3.6-27b", None, user).drafter and found.own_drafter
    assert told[0].startswith(f"{AUTOROUND} (published in 4 bits) is taken: Qwen/Qwen3.6-27B in bfloat16 needs")


@pytest.mark.parametrize(
    ("model", "config", "here"),
    [
        ("qwen3.5-9b", LoadConfig(), ()),
        ("qwen3.6-27b", LoadConfig(quantize="int4"), ()),
        ("qwen3.6-27b", LoadConfig(fit_check=False), ()),
        ("qwen3.6-27b", LoadConfig(), ("Qwen/Qwen3.6-27B",)),
        (AUTOROUND, LoadConfig(), ()),
        ("qwen3.5-122b-a10b", LoadConfig(), ()),
    ],
    ids=["it fits", "a format was asked for", "no check", "it is here", "a variant was named", "no variant fits"],
)
def test_elsewhere_the_choice_stays(model: str, config: LoadConfig, here: tuple[str, ...], user: Settings) -> None:
    choice = choose(model, None, user)
    assert taken(choice, user, config, *here) == (choice, [])


@pytest.mark.parametrize("gib", [24, 80])
def test_a_quantised_target_that_is_here_stays_in_use(
    gib: int, user: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommending, "machine", lambda user, device: named(None, gib))
    choice = choose("qwen3.6-27b", None, user)
    found, told = taken(choice, user, LoadConfig(), AWQ)
    assert (found.name, told) == (AWQ, [f"{AWQ} (published in 4 bits) is taken: it is here"])
    assert (taken(choice, user, LoadConfig(context=262144), AWQ)[0].name == AWQ) == (gib == 80), "where it fits"
    assert taken(choice, user, LoadConfig(), AWQ, "Qwen/Qwen3.6-27B") == (choice, [])


def test_another_drafter_keeps_its_target(user: Settings) -> None:
    choice = replace(choose("qwen3.6-27b", None, user), own_drafter=False)
    assert taken(choice, user, LoadConfig()) == (choice, [])
