"""What a load has measured of its cycles is where later predictions for the card begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.app import load_planning
from dflash_local.app.fitting import folder_shapes
from dflash_local.app.load_planning import keep_speed
from dflash_local.app.recommending import recommended
from dflash_local.app.resolve import Choice
from dflash_local.catalog import bundled
from dflash_local.load_config import LoadConfig
from dflash_local.planner import machine as machines
from dflash_local.planner.machine import Machine
from dflash_local.planner.speed_record import SpeedRecord
from dflash_local.settings import load
from dflash_local.store.paths import speeds_folder

pytest.importorskip("torch")
from dflash_local.engine.fused_runner import FusedRunner  # noqa: E402
from dflash_local.engine.load_pair import load as load_session  # noqa: E402

H200 = Machine("NVIDIA H200", "cuda", 140 * 2**30, 139 * 2**30, "", "cuda:0")


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "nothing measured"])
def test_a_load_keeps_its_costs_for_later_plans(
    measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, user = bundled.find("demo"), load()
    session = load_session(pair, LoadConfig(engine="fused", device="cpu", dtype="float32", context=512))
    runner = session.runner
    assert isinstance(runner, FusedRunner)
    runner.costs = {1: 0.25, 4: 0.4, session.facts.block_size: 0.5} if measured else {}
    session.facts = replace(session.facts, load=LoadConfig())
    monkeypatch.setattr(machines, "this_machine", lambda *_args, **_named: H200)
    try:
        keep_speed(session, pair, user)
    finally:
        session.close()
    kept = SpeedRecord(speeds_folder(user), H200.name).read()
    assert len(kept) == measured
    if measured:
        assert (kept[0].target, kept[0].step_ms, kept[0].cycle_ms, kept[0].rows) == ("demo", 0.25, 0.5, 8)
        assert kept[0].shorter == ((4, 0.4),)
        assert kept[0].predicted_step_ms and kept[0].predicted_cycle_ms
        known = folder_shapes("demo", pair.target, pair.drafter)
        assert known is not None
        best = recommended(Choice("demo", pair.target, pair.drafter), known, H200, user).best
        assert best is not None and best.prediction is not None
        assert best.prediction.basis.startswith("measured on this card at 256 tokens of context")


def test_another_engine_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, user = bundled.find("demo"), load()
    session = load_session(pair, LoadConfig(engine="reference", device="cpu", dtype="float32", context=512))
    monkeypatch.setattr(load_planning, "_planned", lambda *_: pytest.fail("planned"))
    keep_speed(session, pair, user)
    session.close()
    assert SpeedRecord(speeds_folder(user), H200.name).read() == ()
