"""What a load is given of the planner's: the context and the draft side that fit, where the user named none."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.catalog.bundled import Pair, find
from dflash_local.catalog.shapes import shape
from dflash_local.cli.console import Console
from dflash_local.cli.session import LoadWish, fitted, planned_context
from dflash_local.config.drafter_config import DrafterConfig
from dflash_local.config.read_model import read_model
from dflash_local.errors import DoesNotFitError, UsageError
from dflash_local.planner import machine
from dflash_local.planner.machine import Machine
from dflash_local.planner.plan import USABLE, plan
from dflash_local.planner.wish import Wish

MIB = 2**20


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """The configurations of a pair, without weights."""
    for part, repo in (("target", "Qwen/Qwen3-8B"), ("drafter", "z-lab/Qwen3-8B-DFlash-b16")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(shape(repo)))
    return Pair("pair", tmp_path / "target", tmp_path / "drafter", bundled=False)


def card(free: int) -> Machine:
    return Machine("a card", "cuda", 2 * free, free, "", "cuda:0")


def need(pair: Pair, wish: Wish) -> int:
    folders = [pair.target, *([pair.drafter] if pair.drafter else [])]
    target, drafter = (json.loads((folder / "config.json").read_text()) for folder in folders)
    known = read_model(target, "target")
    total = plan(known, DrafterConfig.from_shape(drafter, "drafter"), card(2**50), wish).ledger.total
    assert total is not None
    return total


def ask(pair: Pair, wish: LoadWish, free: int, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadWish, str]:
    """What is loaded on a card with so many bytes free, and what the user is told."""
    monkeypatch.setattr(machine, "this_machine", lambda *_: card(free))
    told = io.StringIO()
    return fitted(pair, wish, Console({}, err=told)), told.getvalue()


def test_all_of_it_where_there_is_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(pair, LoadWish(), 2**40, monkeypatch) == (LoadWish(), "")


def test_the_context_that_fits_in_one_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wish, told = ask(pair, LoadWish(), need(pair, Wish(context=16384)), monkeypatch)
    assert wish == LoadWish(context=16384) and told.count("\n") == 1 and "16,384 of 40,960" in told


def test_the_draft_side_that_fits_in_one_line(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LoadWish(context=20000)
    short = need(pair, Wish(context=20000)) - MIB
    wish, told = ask(pair, asked, short, monkeypatch)
    assert wish == replace(asked, draft_side="8bit") and told.count("\n") == 1 and "draft side 8bit" in told
    with pytest.raises(DoesNotFitError):
        ask(pair, replace(asked, draft_side="full"), short, monkeypatch)
    assert ask(pair, replace(asked, draft_side="full", fit_check=False), short, monkeypatch)[1] == ""


def test_both_where_little_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wish, told = ask(pair, LoadWish(), need(pair, Wish(context=2048)), monkeypatch)
    assert wish == LoadWish(context=USABLE, draft_side="8bit-drafter") and told.count("\n") == 2


def test_the_context_is_known_before_the_load(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    free = need(pair, Wish(context=16384))
    for wish, room in ((LoadWish(), free), (LoadWish(), 2**40), (LoadWish(context=1000), 2**40)):
        monkeypatch.setattr(machine, "this_machine", lambda *_, room=room: card(room))
        loaded = ask(pair, wish, room, monkeypatch)[0].context
        assert planned_context(pair, wish) == (loaded or 40960)
    assert planned_context(pair, LoadWish(fit_check=False)) == 40960
    assert planned_context(replace(pair, target=pair.target / "none"), LoadWish()) is None
    assert planned_context(find("demo"), LoadWish()) == 2048


def test_what_the_load_will_refuse_leaves_the_context_unknown(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: object) -> Machine:
        raise UsageError("there is no such device")

    monkeypatch.setattr(machine, "this_machine", none_here)
    assert planned_context(pair, LoadWish(device="cuda:9")) is None
