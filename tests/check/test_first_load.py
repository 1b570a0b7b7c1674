"""The check of a pair's first load: by itself on a card, once, told at every load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash_local import settings
from dflash_local.app import loading
from dflash_local.app.model_sources import LocalModels
from dflash_local.catalog import bundled
from dflash_local.cli.console import Console
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from tests.cli.conftest import Cli, cli  # noqa: F401  # a fixture

if TYPE_CHECKING:
    from dflash_local.check.findings import Finding

pytestmark = pytest.mark.needs_torch
RUN = ("run", "demo", "Count from 1 to 3.", "--max-new-tokens", "4", "--no-fit-check")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks on a CPU, too, and finds a drafter that is not good; how often is counted."""
    from dflash_local.check import run
    from dflash_local.check.findings import Finding

    counted: list[int] = []

    def check(*_: Any) -> tuple[Finding, ...]:
        counted.append(1)
        return Finding("target", "ok", "fine"), Finding("drafter", "warning", "accepts little", "another one")

    monkeypatch.setattr(run, "check", check)
    monkeypatch.setattr(loading, "CHECKED_DEVICE", "cpu")
    return counted


def test_a_pair_is_checked_once_and_told_at_every_load(cli: Cli, times: list[int], own_home: Path) -> None:  # noqa: F811
    for _ in range(2):
        found = cli(*RUN)
        assert found.code == 0 and found.out.strip()
        assert "check of the drafter: accepts little (warning; another one)" in found.err and "fine" not in found.err
    assert len(times) == 1 and len([*(own_home / ".cache" / "dflash-local" / "checks").iterdir()]) == 1
    assert cli(*RUN, "--dtype", "bfloat16").code == 0 and len(times) == 2
    assert "accepts little" in cli("check", "demo", "--no-fit-check").out and len(times) == 3


def test_it_is_left_out_on_demand_and_where_something_is_measured(cli: Cli, times: list[int]) -> None:  # noqa: F811
    assert "accepts little" not in cli(*RUN, "--skip-check").err
    assert cli("check", "demo", "--only", "kernels").code == 0
    assert not times


def test_on_a_cpu_nothing_is_checked_unasked(cli: Cli, times: list[int], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(loading, "CHECKED_DEVICE", "cuda")
    assert cli(*RUN).code == 0 and not times


def test_a_served_pair_says_how_far_it_is_and_has_the_notice(times: list[int]) -> None:
    user, pair = settings.load(), bundled.find("demo")
    stages: list[str] = []
    load = LoadConfig(fit_check=False)
    model = LocalModels(user, load, Console({}).notify).model(pair, load, thinking=False)
    session = model.load(lambda event: stages.append(event.stage))
    session.close()
    assert times and session.facts.notices[-1].startswith("check of the drafter") and "ready" in stages


def test_what_was_found_is_shown_in_a_chat_and_goes_over_the_endpoint(cli: Cli, times: list[int]) -> None:  # noqa: F811
    found = cli("chat", "demo", "--no-fit-check", "--context", "64", stdin="/check\n").err
    assert "target     ok       fine\n" in found
    assert "drafter    warning  accepts little\n                    another one\n" in found
    assert "not checked" in cli("chat", "demo", "--no-fit-check", "--skip-check", stdin="/check\n").err
    session = loading.open_session(bundled.find("demo"), LoadConfig(fit_check=False))
    loading.checked(session, bundled.find("demo"), LoadConfig(), settings.load(), lambda _text, _part: None)
    session.close()
    checks = session.facts.checks
    assert [each.state for each in checks] == ["ok", "warning"] and checks[1].remedy == "another one"
    assert SessionFacts.from_dict(json.loads(json.dumps(session.facts.as_dict()))) == session.facts


def test_an_interrupted_check_closes_the_session(times: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.check import run

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "check", interrupted)
    session = loading.open_session(bundled.find("demo"), LoadConfig())
    closed: list[bool] = []
    monkeypatch.setattr(session, "close", lambda: closed.append(True))
    with pytest.raises(KeyboardInterrupt):
        loading.checked(session, bundled.find("demo"), LoadConfig(), settings.load(), lambda _text, _part: None)
    assert closed == [True]
