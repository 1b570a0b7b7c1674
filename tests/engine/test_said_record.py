"""The ids that replies say are counted, and the next load's frequent head has them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app import loading
from dflash_local.catalog import bundled
from dflash_local.engine import drafter_precision
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.session import Session
from dflash_local.layout import draft_head
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Message, Request, SamplingParams
from dflash_local.store import said_record
from dflash_local.store.paths import speeds_folder
from dflash_local.store.said_record import SaidRecord
from tests.engine_sessions import Reply

PLAIN = LoadConfig(device="cpu", engine="fused", drafter_precision="full")
FREQUENT_HEAD = LoadConfig(device="cpu", engine="fused", drafter_precision="frequent")
HELLO = Request((Message("user", "hello"),), sampling=SamplingParams(), limits=Limits(max_new_tokens=40))


def test_counts_add_up_by_vocabulary(tmp_path: Path) -> None:
    record = SaidRecord(tmp_path)
    assert record.read("a") == []
    record.add("a", [7, 7, 3, 9])
    record.add("a", [3, 3, 9])
    assert record.read("a") == []
    record.write("a")
    record.add("b", [1] * said_record.AT_ONCE)
    assert SaidRecord(tmp_path).read("a") == [3, 7, 9] and SaidRecord(tmp_path).read("b") == [1]
    SaidRecord(None).add("a", [5])
    assert SaidRecord(None).read("a") == []


def test_a_record_stays_small_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said_record, "MANY", 100)
    monkeypatch.setattr(said_record, "MOST", 10)
    monkeypatch.setattr(said_record, "AT_ONCE", 1)
    record = SaidRecord(tmp_path)
    record.add("a", [1] * 60 + [2] * 30 + [3])
    record.add("a", [4] * 20)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == {"1": 30, "2": 15, "4": 10}, "halved, and what was said once is gone"
    record.add("a", [*range(10, 40), 25])
    kept = json.loads(path.read_text())
    assert len(kept) == 10 and list(kept)[:4] == ["1", "2", "4", "25"]


@pytest.mark.parametrize("text", ["[", "[3]", "3", '{"x": 1}', '{"-1": 1}', '{"1": 0}', '{"1": 1.5}', '{"1": 1e99}'])
def test_what_is_no_record_is_passed_over(text: str, tmp_path: Path) -> None:
    record = SaidRecord(tmp_path)
    (tmp_path / "said-a.json").write_text(text)
    assert record.read("a") == []
    record.add("a", [5])
    record.write("a")
    assert record.read("a") == [5]


def drafted_ids(session: Session) -> list[int]:
    runner = session.runner
    assert isinstance(runner, FusedRunner) and runner.proposer is not None and runner.proposer.head_ids is not None
    ids: list[int] = runner.proposer.head_ids.tolist()
    return ids


def test_the_next_load_drafts_the_ids_that_replies_said_and_measuring_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for room in (draft_head, drafter_precision):
        monkeypatch.setattr(room, "FREQUENT", 64)
    user, pair = settings.load(), bundled.find("demo")
    record = SaidRecord(speeds_folder(user))
    with closing(loading.open_held(pair, PLAIN, user, print)) as session:
        assert session.tokenizer is not None
        name = session.tokenizer.vocabulary
        assert record.read(name) == [], "loading says nothing"
        reply = Reply(list(session.generate(HELLO)))
    said = record.read(name)
    assert set(said) == set(reply.ids) and max(said) >= 64
    with closing(loading.open_held(pair, FREQUENT_HEAD, user, print)) as session:
        assert drafted_ids(session) == drafter_precision.frequent_ids(said, 1024)
        assert Reply(list(session.generate(HELLO))).ids == reply.ids
    uncounted = bundled.find("demo", str(bundled.FOLDER / "demo" / "drafter"))
    with (
        closing(loading.open_held(uncounted, FREQUENT_HEAD, user, print)) as other,
        loading.engine_session(pair, FREQUENT_HEAD, user, print) as measured,
    ):
        before = (speeds_folder(user) or Path()).joinpath(f"said-{name}.json").read_text()
        for session in (other, measured):
            assert drafted_ids(session) == list(range(64)) and list(session.generate(HELLO))
        assert (speeds_folder(user) or Path()).joinpath(f"said-{name}.json").read_text() == before
