"""Replies that take turns on one session: at whatever border one is set aside, it says what it says alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dflash_local.catalog import bundled
from dflash_local.drafters.kinds import LOOKUP, folder_of
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.events import Event, Finished, PrefillProgress, Started, Step
from dflash_local.request import Constraint, Limits, Request, SamplingParams, user_request
from tests.engine.named_pairs import DSPARK, named_pair

ASKED = LoadConfig(device="cpu", dtype="float32", context=1000)
CASES = [
    *((name, engine) for name in ("demo-hybrid", "qwen3-dflash2-b8") for engine in ("fused", "reference")),
    *((name, "fused") for name in ("qwen3-v2-swa-b16", "qwen35-v2-swa-b8", DSPARK)),
]
COSTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5}
SAMPLED, FILTERED = SamplingParams(temperature=0.8, seed=3), SamplingParams(1.0, top_k=20, presence_penalty=0.5, seed=4)


def open_session(name: str, engine: str, folder: Path, **options: object) -> Session:
    asked = replace(ASKED, engine=engine, mtp=name == "demo-hybrid", **options)  # type: ignore[arg-type]
    session = load(named_pair(name, folder / "drafter"), asked)
    session.runner.target.prefill_chunk = 32  # type: ignore[union-attr]
    session.runner.costs = COSTS  # type: ignore[misc]  # lengths adapt, and two sampled replies share what is learnt
    session.runner.verify_costs = COSTS  # type: ignore[misc]
    return session


def of_ids(seed: int, length: int, new: int, **fields: object) -> Request:
    draw = Random(seed)
    ids = tuple(draw.randrange(10, 90) for _ in range(length))
    return Request(prompt_ids=ids, limits=Limits(new), **fields)  # type: ignore[arg-type]


REQUESTS = (
    of_ids(1, 100, 9),
    of_ids(2, 50, 14, sampling=SAMPLED),
    of_ids(3, 40, 5, sampling=FILTERED, logprobs=2),
    of_ids(4, 150, 6, mode="ar"),
)


def take_turns(session: Session, requests: Sequence[Request]) -> list[list[Event]]:
    """The events of each, where every event is the end of a turn."""
    replies = [(session.generate(request), list[Event]()) for request in requests]
    waiting = list(replies)
    while waiting:
        events, found = waiting.pop(0)
        found.append(next(events))
        if session.set_aside():
            waiting.append((events, found))
        else:  # it was at its end
            found += list(events)
    return [found for _, found in replies]


def told(events: Sequence[Event]) -> list[tuple[object, ...]]:
    """Ids and likelihoods, and why it ended."""
    steps = [event for event in events if isinstance(event, Step)]
    ids = [token for step in steps for token in step.token_ids]
    found = [(row.token_id, round(row.logprob, 4)) for step in steps for row in step.logprobs]
    assert isinstance(events[-1], Finished)
    return [tuple(ids), tuple(found), (events[-1].reason, events[-1].usage)]


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_set_aside_behind_every_event_replies_are_the_same(name: str, engine: str, tmp_path: Path) -> None:
    session = open_session(name, engine, tmp_path)
    room = session.conversations.held.most_bytes
    alone = []
    for request in REQUESTS:
        session.reset()
        alone.append(list(session.generate(request)))
    session.reset()
    together = take_turns(session, REQUESTS)
    assert [told(events) for events in together] == [told(events) for events in alone]
    for found, events in zip(together, alone):
        assert [type(each) for each in found[:5]] == [type(each) for each in events[:5]]
    assert sum(isinstance(event, PrefillProgress) for event in together[3]) == 5
    assert session.conversations.held.most_bytes == room, "what they took of it is free"


def test_grammars_stop_strings_and_copies_go_on_where_they_were() -> None:
    session = load(bundled.find("demo", str(folder_of(LOOKUP))), replace(ASKED, engine="fused"))
    requests = (
        user_request("Count from 3 to 17.", constraint=Constraint("regex", "(3, )?4, [0-9, ]{20}")),
        user_request("Count from 10 to 40.", limits=Limits(60, stop=("19",))),
        user_request("Count from 3 to 17.", constraint=Constraint("json_object"), sampling=SAMPLED, limits=Limits(20)),
    )
    alone = [list(session.generate(request)) for request in requests]
    together = take_turns(session, requests)
    assert [told(events) for events in together] == [told(events) for events in alone]
    assert [events[-1].stop for events in together] == ["", "19", ""]  # type: ignore[union-attr]
    texts = [[piece.text for event in events if isinstance(event, Step) for piece in event.pieces] for events in alone]
    assert "".join(texts[0]).startswith(("3, 4", "4, "))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return open_session("demo-hybrid", "fused", tmp_path)


@pytest.mark.parametrize("behind", [PrefillProgress, Step])
def test_one_that_is_cancelled_while_set_aside_ends_without_the_device(session: Session, behind: type) -> None:
    request, other = of_ids(1, 300, 400), of_ids(2, 60, 12)
    alone = told(list(session.generate(other)))
    stopped: list[bool] = []
    left, running = session.generate(request, lambda: bool(stopped)), session.generate(other)
    while not isinstance(next(left), behind):
        pass
    assert session.set_aside()
    found = [next(running)]
    stopped.append(True)
    *_, end = left
    assert isinstance(end, Finished) and end.reason == "cancelled"
    assert told([*found, *running]) == alone
    later = replace(request, prompt_ids=(*request.prompt_ids, 11, 12), limits=Limits(1))
    (started,) = (event for event in session.generate(later) if isinstance(event, Started))
    assert started.reused_tokens, "what was done of it is kept"


def test_an_iterator_that_is_left_while_set_aside_harms_nobody(session: Session) -> None:
    request, other = of_ids(1, 90, 50), of_ids(2, 60, 12)
    alone = told(list(session.generate(other)))
    left, running = session.generate(request), session.generate(other)
    next(left)
    assert session.set_aside()
    found = [next(running) for _ in range(4)]
    del left
    assert told([*found, *running]) == alone


def test_without_room_a_reply_goes_on(tmp_path: Path) -> None:
    session = open_session("qwen3-dflash2-b8", "fused", tmp_path, cache_memory=0.0)
    alone = told(list(session.generate(REQUESTS[0])))
    found = []
    for event in session.generate(REQUESTS[0]):
        found.append(event)
        assert not session.set_aside()
    assert told(found) == alone and session.set_aside(), "nothing is under way"


def test_time_set_aside_is_nobodys(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, later = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + later[0])
    found = []
    for event in session.generate(of_ids(1, 100, 9)):
        found.append(event)
        if session.set_aside():
            later[0] += 1e6
    assert isinstance(event, Finished) and later[0] > 6e6
    assert event.stats.prefill_s + event.stats.decode_s < 1e6
    assert all(step.t_s < 1e6 for step in found if isinstance(step, Step))
