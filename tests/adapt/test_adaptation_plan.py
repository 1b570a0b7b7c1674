"""The plan before a drafter learns: its figures in words, and one line where memory or disk are too small for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local import settings
from dflash_local.adapt import run
from dflash_local.app import adaptation_plan, load_planning
from dflash_local.app.adaptation_plan import AdaptationPlan, plan_adaptation
from dflash_local.catalog import bundled
from dflash_local.cli.main import main
from dflash_local.load_config import LoadConfig
from dflash_local.planner import hardware
from dflash_local.planner.hardware import Folder
from dflash_local.planner.machine import this_machine
from dflash_local.tables import amount

CPU = LoadConfig(device="cpu", dtype="float32")
MIB = 2**20
ADAPT = ("adapt", "demo", "--from", "self", "--device", "cpu")


def planned(load: LoadConfig = CPU, minutes: float = 1.0) -> AdaptationPlan:
    return plan_adaptation(bundled.find("demo"), load, minutes, settings.load(), lambda _: None)


def memory_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    where = replace(this_machine("cpu"), free=free, free_now=free)
    monkeypatch.setattr(load_planning, "machine", lambda *_, **__: where)


def test_the_pair_is_loaded_for_the_longest_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned()
    monkeypatch.setattr(adaptation_plan, "CONTEXT", 512)
    short, asked = planned(), planned(replace(CPU, context=1024))
    assert not found.load.adaptation and (short.load.context, asked.load.context) == (512, 1024)
    assert short.loaded < asked.loaded < found.loaded and short.learning == asked.learning == found.learning


def test_more_minutes_keep_more_text_up_to_a_bound() -> None:
    short, long, longest, beyond = (planned(minutes=minutes).disk for minutes in (1.0, 2.0, 64.0, 1000.0))
    assert run.kept_tokens(64.0) == run.MOST_TOKENS == run.kept_tokens(1000.0)
    assert short < long < longest == beyond


def test_too_little_memory_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For the pair, or for a drafter that learns from more windows at once than there is room for."""
    memory_of(20 * MIB, monkeypatch)
    assert main([*ADAPT]) == 5 and "demo in float32 needs" in capsys.readouterr().err
    memory_of(100 * MIB, monkeypatch)
    monkeypatch.setitem(run.RECIPES, "cpu", replace(run.RECIPES["cpu"], windows=16))
    assert main([*ADAPT]) == 5
    told = capsys.readouterr().err
    assert "a drafter that learns needs" in told and "CPU has 100.0 MiB usable" in told
    assert planned(replace(CPU, fit_check=False)).learning > 100 * MIB


def test_too_little_room_on_disk_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    need = planned(LoadConfig(device="cpu")).disk
    monkeypatch.setattr(hardware, "folder", lambda path: Folder(path, True, 3 * MIB))
    assert main([*ADAPT, "--minutes", "1"]) == 5
    told = capsys.readouterr().err
    assert f"{amount(need)} is written to" in told and "3.0 MiB is free there" in told
    work, _ = adaptation_plan.adaptation_folders(bundled.find("demo"), settings.load())
    before = run.work_folder(bundled.find("demo"), work)
    before.mkdir(parents=True)
    (before / "features.bin").write_bytes(bytes(need - 3 * MIB))
    assert planned().disk == need, "what an earlier run has left is gone on with"


def test_it_is_told_before_anything_is_learnt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_local.cli.adapt.measurements.adapt_pair", lambda *_: ({"report": "adapt"}, ["done"]))
    assert main([*ADAPT, "--minutes", "1"]) == 0
    told = capsys.readouterr()
    found = planned(LoadConfig(device="cpu"))
    assert found.told in " ".join(told.err.split()) and "done" in told.out
    assert found.learning < found.loaded
