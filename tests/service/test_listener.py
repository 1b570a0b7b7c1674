"""The mailbox between the worker and a reader of any speed."""

from __future__ import annotations

import threading
from functools import partial
from itertools import islice
from typing import Literal

import pytest

from dflash_local.errors import UsageError
from dflash_local.events import Notice, Piece, PrefillProgress, Queued, Started, Step, TokenLogprob
from dflash_local.service import listener as listener_module
from dflash_local.service.listener import Listener


def step(index: int) -> Step:
    origin: Literal["accepted", "bonus"] = "accepted" if index % 2 else "bonus"
    likely = (TokenLogprob(index, f"{index} ", -0.5),)
    return Step((Piece(f"{index} ", origin=origin),), (index,), 3, 2, 4, float(index), likely)


def test_a_quick_reader_gets_every_step_as_it_was() -> None:
    listener = Listener(capacity=4)
    for index in range(3):
        listener.put(step(index))
    listener.end()
    assert list(listener) == [step(0), step(1), step(2)]


def test_a_slow_reader_gets_few_events_but_every_token_and_all_text() -> None:
    listener = Listener(capacity=4)
    listener.put(Started(5, 0, 0.1))
    for index in range(1000):
        listener.put(step(index))
    listener.end()
    events = list(listener)
    steps = [event for event in events if isinstance(event, Step)]
    assert len(events) <= 5
    assert [token for s in steps for token in s.token_ids] == list(range(1000))
    assert "".join(piece.text for s in steps for piece in s.pieces) == "".join(f"{i} " for i in range(1000))
    assert [sum(getattr(s, name) for s in steps) for name in ("drafted", "accepted", "rows")] == [3000, 2000, 4000]
    assert [found.token_id for s in steps for found in s.logprobs] == list(range(1000))
    assert steps[-1].t_s == 999.0


def test_merging_joins_only_pieces_of_one_channel_and_origin() -> None:
    listener = Listener(capacity=1)
    for text, channel in (("a", "thinking"), ("b", "thinking"), ("c", "final"), ("d", "final")):
        listener.put(Step((Piece(text, channel),), (1,), 0, 0, 0, 0.0))  # type: ignore[arg-type]
    listener.end()
    (merged,) = listener
    assert isinstance(merged, Step)
    assert [(piece.text, piece.channel) for piece in merged.pieces] == [("ab", "thinking"), ("cd", "final")]


def test_merging_keeps_the_experts_that_were_looked_at_last() -> None:
    listener = Listener(capacity=1)
    for experts in (40.0, None, 41.5, None):
        listener.put(Step((), (1,), 7, 0, 8, 0.0, experts=experts))
    listener.end()
    assert [event.experts for event in listener if isinstance(event, Step)] == [41.5]


def test_a_flood_of_notices_and_steps_stays_bounded() -> None:
    listener = Listener(capacity=8)
    for index in range(500):
        listener.put(step(index))
        listener.put(Notice(str(index)))
    listener.end()
    events = list(listener)
    assert len(events) <= 9
    assert [token for e in events if isinstance(e, Step) for token in e.token_ids] == list(range(500))
    assert Notice("499") in events


def test_a_notice_gives_way_only_to_a_newer_one_and_only_where_too_many_wait() -> None:
    listener = Listener(capacity=3)
    for event in (Started(5, 0, 0.1), Notice("a"), Notice("b"), Notice("c"), Queued(1)):
        listener.put(event)
    listener.end()
    assert list(listener) == [Started(5, 0, 0.1), Notice("b"), Notice("c"), Queued(1)]


def test_progress_replaces_its_predecessor() -> None:
    listener = Listener()
    for event in (Queued(2), Queued(1), PrefillProgress(1, 9), PrefillProgress(9, 9)):
        listener.put(event)
    listener.end()
    assert list(listener) == [Queued(1), PrefillProgress(9, 9)]


def test_the_error_comes_after_the_events_and_on_every_further_read() -> None:
    listener = Listener()
    listener.put(step(0))
    listener.end(UsageError("bad"))
    listener.put(step(1))  # too late: nothing follows an end
    assert next(listener) == step(0)
    for _ in range(2):
        with pytest.raises(UsageError, match="bad"):
            next(listener)


def test_the_first_end_counts() -> None:
    listener = Listener()
    listener.end()
    listener.end(UsageError("too late"))
    assert list(listener) == []


@pytest.mark.timeout(30)
def test_a_waiting_reader_is_woken_by_an_event_and_by_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "WAIT_S", 3600.0)  # it need not look for itself
    listener = Listener()
    for act, expected in ((partial(listener.put, step(7)), [step(7)]), (listener.end, [])):
        timer = threading.Timer(0.05, act)
        timer.start()
        assert list(islice(listener, 1)) == expected
        timer.join()
