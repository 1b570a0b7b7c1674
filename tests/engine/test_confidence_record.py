"""What is learnt of a pair's confidences is there at its next load."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_local import settings
from dflash_local.app import loading
from dflash_local.catalog import bundled
from dflash_local.engine.cycle_costs import MeasuredGrowth
from dflash_local.engine.scheduler import Scheduler
from dflash_local.engine.session import Session
from dflash_local.engine.survival import Survival
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.load_config import LoadConfig
from dflash_local.request import Message, Request, SamplingParams
from dflash_local.store.confidence_record import ConfidenceRecord
from dflash_local.store.paths import speeds_folder
from dflash_local.text_index import TextIndex

COSTS = {1: 1.0, 2: 1.5, 4: 1.8, 8: 3.0, 16: 6.0}


def controller(cycles: int, block: int = 16) -> VerifyLength:
    """One that has seen drafts which are right where they are sure."""
    control, draw = VerifyLength(COSTS, block), random.Random(1)
    for _ in range(cycles):
        told = [draw.choice((0.2, 6.0)) for _ in range(block - 1)]
        rows = control.cut(told)
        right = next((slot for slot, each in enumerate(told) if draw.random() > each / 6.2), block - 1)
        control.add(rows, min(right, rows - 1), told)
    return control


def scheduler() -> Scheduler:
    runner: Any = SimpleNamespace(
        proposer=True, costs=COSTS, verify_costs=COSTS, own_costs={}, experts=None, wait_ms=0.0, growth=MeasuredGrowth()
    )
    return Scheduler(runner, 16, TextIndex())


def test_a_controller_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    record, before, again = ConfidenceRecord(tmp_path, "pair"), controller(500), VerifyLength(COSTS, 16)
    assert record.read(True) == {}
    record.keep(True, {"code": controller(5).learnt})
    record.keep(True, {"code": before.learnt})
    record.keep(False, {"code": controller(20).learnt})
    ConfidenceRecord(tmp_path, "other").keep(True, {"code": controller(20).learnt})
    again.recall(record.read(True)["code"])
    assert again.learnt == before.learnt
    for each in (before, again):  # the rate of the last cycles is not kept: let it be the plain step's in both
        for _ in range(2000):
            each.add(1, 0)
    for told in ([6.0] * 15, [0.2] * 15, [6.0, 6.0, 6.0, 0.2] + [6.0] * 11):
        assert again.cut(told) == before.cut(told)
    assert again.cut([6.0] * 15) > again.cut([0.2] * 15)


def test_what_is_of_another_block_or_no_record_is_passed_over(tmp_path: Path) -> None:
    record, known = ConfidenceRecord(tmp_path, "pair"), scheduler().learnt | {"tool": controller(100).learnt}
    right, other = known["tool"], {"final": controller(100, 8).learnt, "copies": Survival(7).learnt}
    changed = [[first, *right[1:]] for first in (-1.0, float("nan"), None)]
    entries: list[object] = [other, {"other": right}, *({"tool": each} for each in (right[:-1], *changed, 3)), right, 3]
    texts = [json.dumps({"pair, greedy": entry}) for entry in entries]
    for text in (*texts, "[", "[3]", "3"):
        (tmp_path / "confidences.json").write_text(text)
        fresh = scheduler()
        fresh.recall(record.read(True))
        assert fresh.learnt == scheduler().learnt, text
    fresh.recall(known)
    assert fresh.learnt == known
    record.keep(True, known)
    assert record.read(True) == known
    record.keep(True, {"tool": right})
    assert record.read(True) == known | {"tool": right}, "what a load without the target's own layer lacks stays"


def learnt_of(session: Session, request: Request) -> dict[str, list[float]]:
    """What a reply at planted costs leaves in its controller."""
    vars(session.runner)["costs"] = {rows: cost for rows, cost in COSTS.items() if rows <= 8}
    assert list(session.generate(request))
    return session.schedulers[request.sampling.greedy].learnt


def test_a_load_begins_with_what_the_last_one_learnt_and_measuring_with_nothing() -> None:
    user, pair, load = settings.load(), bundled.find("demo"), LoadConfig(device="cpu")
    greedy = Request((Message("user", "hello"),), sampling=SamplingParams())
    sampled, learnt = replace(greedy, sampling=SamplingParams(temperature=1.0, seed=1)), []
    for request in (greedy, greedy, sampled):
        with closing(loading.open_held(pair, load, user, print)) as session:
            learnt.append(learnt_of(session, request))
    assert learnt[0] != learnt[1], "the second reply is the first one, and was to add to it"
    record = ConfidenceRecord(speeds_folder(user), f"demo with demo (bundled), {session.facts.engine}")
    assert (record.read(True), record.read(False)) == (learnt[1], learnt[2])
    uncounted = loading.open_held(bundled.find("demo", str(bundled.FOLDER / "demo" / "drafter")), load, user, print)
    with closing(uncounted), loading.engine_session(pair, load, user, print) as measured:
        assert learnt_of(uncounted, greedy) == learnt_of(measured, greedy) == learnt[0]
    assert (record.read(True), record.read(False)) == (learnt[1], learnt[2])
