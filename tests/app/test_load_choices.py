"""What a load dialog offers: every way to load a pair on a machine, in order, with download, context and KV format."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.app import load_choices as module
from dflash_local.app.load_choices import LoadChoice, LoadChoices, load_choices
from dflash_local.catalog.row import Repo
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.planner.machine import Machine, named, this_machine
from dflash_local.settings import Settings, load
from dflash_local.ui.choice_text import COLUMNS, basis, choice_row


@pytest.fixture
def user() -> Settings:
    return load()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_machine(machine: Machine, *here: str) -> None:
        monkeypatch.setattr(module, "machine", lambda _user, **_more: machine)

        def find(repo: Repo | None) -> Any:
            return SimpleNamespace(complete=True, missing=()) if repo is not None and repo.id in here else None

        monkeypatch.setattr(module, "model_store", lambda _user: SimpleNamespace(find=find))
        monkeypatch.setattr(module, "shapes", lambda choice, _store, real=module.shapes: real(choice, None))
        monkeypatch.setattr(
            module, "recommended", lambda *a, real=module.recommended, **k: real(*a, **{**k, "store": None})
        )

    return set_machine


def offered(name: str, user: Settings, asked: LoadConfig | None = None) -> LoadChoices:
    found = load_choices(name, user, asked)
    assert found is not None
    return found


def test_what_fits_comes_first_and_each_row_says_what_it_takes(user: Settings, on: Any) -> None:
    on(named("RTX 4090", 24))
    found = offered("qwen3.6-27b", user)
    fits = [each.fits for each in found.choices]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    assert found.preselected == 0 and found.choices[0].model == "Lorbus/Qwen3.6-27B-int4-AutoRound"
    rows = [choice_row(each) for each in found.choices]
    assert all(len(row.cells) == len(COLUMNS) for row in rows)
    assert rows[0].remark == "published in 4 bits" and "too little" in rows[-1].remark
    assert "scaled by data sheets" in basis(found)


def test_what_is_here_is_preselected_and_needs_no_download(user: Settings, on: Any) -> None:
    on(named("RTX 4090", 24), "cyankiwi/Qwen3.6-27B-AWQ-INT4", "z-lab/Qwen3.6-27B-DFlash")
    found = offered("qwen3.6-27b", user)
    assert found.preselected is not None
    chosen = found.choices[found.preselected]
    assert chosen.model == "cyankiwi/Qwen3.6-27B-AWQ-INT4" and chosen.here and chosen.option.weights.quantize is None
    others = [each.download_gib for each in found.choices if each.model == "Lorbus/Qwen3.6-27B-int4-AutoRound"]
    assert others and all(size and size < 19 for size in others), "its drafter is here"


def test_a_shorter_context_and_no_drafter_hold_for_every_choice(user: Settings, on: Any) -> None:
    on(named("RTX 4090", 24))
    found = offered("qwen3.5-9b", user, LoadConfig(context=8192, draft=False))
    fitting = [each for each in found.choices if each.fits]
    assert fitting and {each.plan.context for each in fitting} == {8192}
    assert all(not each.config.draft and choice_row(each).cells[4] == "no drafter" for each in fitting)
    drafted = offered("qwen3.5-9b", user, LoadConfig(context=8192)).choices[0]
    assert found.has_drafter and drafted.download_gib and fitting[0].download_gib
    assert fitting[0].download_gib < drafted.download_gib, "the drafter need not be fetched"


def test_keys_and_values_in_8_bits_are_offered_where_they_leave_more_context(user: Settings, on: Any) -> None:
    on(named(None, 19))
    found = offered("qwen3.6-27b", user)
    longest = load_choices("qwen3.6-27b", user, preference="context")
    assert longest is not None

    def of_a_variant(choices: tuple[LoadChoice, ...]) -> list[LoadChoice]:
        return [each for each in choices if each.fits and "Lorbus" in each.model]

    plain, coded = of_a_variant(found.choices)
    assert coded.config.kv_cache == "int8" and (coded.plan.context or 0) > (plain.plan.context or 0)
    assert plain.config.kv_cache == "auto", "first: replies change by the other"
    assert [each.option.coded_kv for each in of_a_variant(longest.choices)] == [True, False]


def test_a_bundled_pair_on_a_cpu_is_here_and_the_reference_engine_slow(
    user: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "machine", lambda _user, **_more: this_machine("cpu"))
    found = offered("demo", user)
    assert found.preselected == 0 and found.choices[0].here
    row = choice_row(found.choices[0])
    assert row.cells[-2:] == ("reference (slow)", "here") and row.cells[3:5] == ("-", "-")
    assert all(each.config.quantize is None for each in found.choices), "decoded again: that saves nothing"


def test_the_drafter_can_be_switched_on_again_and_nothing_is_left_to_choose_of_one_way(
    user: Settings, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(named("RTX 4090", 24))
    assert offered("qwen3.5-9b", user, LoadConfig(draft=False)).has_drafter
    monkeypatch.setattr(module, "machine", lambda _user, **_more: this_machine("cpu"))
    toy = offered("demo", user)
    assert toy.settled and not replace(toy, choices=toy.choices * 2).settled
    missing = replace(toy.choices[0], download_gib=1.0)
    assert not replace(toy, choices=(missing,)).settled


def test_a_target_without_a_drafter_is_planned_where_none_is_asked_for(
    user: Settings, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(named("RTX 4090", 24))
    choose = module.choose

    def without(name: str, drafter: str | None, user: Settings, *, draft: bool = True) -> Any:
        if draft:
            raise UsageError("no drafter is known")
        return replace(choose(name, drafter, user), drafter=None)

    monkeypatch.setattr(module, "choose", without)
    assert not offered("qwen3.5-9b", user, LoadConfig(draft=False)).has_drafter
    with pytest.raises(UsageError, match="no drafter"):
        load_choices("qwen3.5-9b", user)


def test_bitsandbytes_is_offered_only_where_nothing_else_fits(user: Settings, on: Any) -> None:
    old = replace(named("RTX 4090", 16), kernels=False)  # no kernels: the reference engine alone
    on(old)
    fitting = [each for each in offered("qwen3-8b", user).choices if each.fits]
    assert [each.config.quantize for each in fitting] == ["bnb-int8", "bnb-nf4"]
    on(replace(old, free=80 * 2**30))
    assert all(each.config.bitsandbytes is None for each in offered("qwen3-8b", user).choices)


def test_a_cpu_without_room_for_float32_is_offered_bfloat16_first(user: Settings, on: Any) -> None:
    on(replace(this_machine("cpu"), memory=24 * 2**30, free=22 * 2**30, bfloat16=False))
    fitting = [each for each in offered("qwen3-8b", user).choices if each.fits]
    assert fitting[0].config.dtype == "bfloat16" and fitting[0].config.quantize is None
    assert fitting[0].option.arguments == "--dtype bfloat16" and "bfloat16" in choice_row(fitting[0]).cells[0]
