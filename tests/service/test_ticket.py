"""The mailbox between the worker and a reader of any speed."""

from __future__ import annotations

import threading
from functools import partial
from itertools import islice
from typing import Literal

import pytest

from dflash_local.errors import UsageError
from dflash_local.events import Notice, Piece, PrefillProgress, Queued, Started, Step, TokenLogprob
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts, nothing_done
from dflash_local.request import Request
from dflash_local.service import ticket as ticket_module
from dflash_local.service.ticket import Ticket

REQUEST = Request(prompt_ids=(1,))
END = nothing_done(SessionFacts("target", None, 1, True, LoadConfig()), REQUEST)


def new_ticket(capacity: int = 64) -> Ticket:
    return Ticket(REQUEST, lambda _: None, capacity)


def step(index: int) -> Step:
    origin: Literal["accepted", "bonus"] = "accepted" if index % 2 else "bonus"
    likely = (TokenLogprob(index, f"{index} ", -0.5),)
    return Step((Piece(f"{index} ", origin=origin),), (index,), 3, 2, 4, float(index), likely)


def test_a_quick_reader_gets_every_step_as_it_was() -> None:
    ticket = new_ticket(4)
    for index in range(3):
        ticket.publish(step(index))
    ticket.publish(END)
    assert list(ticket) == [step(0), step(1), step(2), END]


def test_a_slow_reader_gets_few_events_but_every_token_and_all_text() -> None:
    ticket = new_ticket(4)
    ticket.publish(Started(5, 0, 0.1))
    for index in range(1000):
        ticket.publish(step(index))
    ticket.publish(END)
    events = list(ticket)
    steps = [event for event in events if isinstance(event, Step)]
    assert len(events) <= 6
    assert [token for s in steps for token in s.token_ids] == list(range(1000))
    assert "".join(piece.text for s in steps for piece in s.pieces) == "".join(f"{i} " for i in range(1000))
    assert [sum(getattr(s, name) for s in steps) for name in ("drafted", "accepted", "rows")] == [3000, 2000, 4000]
    assert [found.token_id for s in steps for found in s.logprobs] == list(range(1000))
    assert steps[-1].t_s == 999.0


def test_merging_joins_only_pieces_of_one_channel_and_origin() -> None:
    ticket = new_ticket(1)
    for text, channel in (("a", "thinking"), ("b", "thinking"), ("c", "final"), ("d", "final")):
        ticket.publish(Step((Piece(text, channel),), (1,), 0, 0, 0, 0.0))  # type: ignore[arg-type]
    ticket.publish(END)
    merged, _ = ticket
    assert isinstance(merged, Step)
    assert [(piece.text, piece.channel) for piece in merged.pieces] == [("ab", "thinking"), ("cd", "final")]


def test_merging_keeps_the_experts_that_were_looked_at_last() -> None:
    ticket = new_ticket(1)
    for experts in (40.0, None, 41.5, None):
        ticket.publish(Step((), (1,), 7, 0, 8, 0.0, experts=experts))
    ticket.publish(END)
    assert [event.experts for event in ticket if isinstance(event, Step)] == [41.5]


def test_merging_counts_the_cycles_that_drafted() -> None:
    ticket = new_ticket(1)
    for drafted in (3, 0, 3):
        ticket.publish(Step((), (1,), drafted, 0, drafted + 1, 0.0))
    ticket.publish(END)
    assert [event.drafts for event in ticket if isinstance(event, Step)] == [2]


def test_a_flood_of_notices_and_steps_stays_bounded() -> None:
    ticket = new_ticket(8)
    for index in range(500):
        ticket.publish(step(index))
        ticket.publish(Notice(str(index)))
    ticket.publish(END)
    events = list(ticket)
    assert len(events) <= 10
    assert [token for e in events if isinstance(e, Step) for token in e.token_ids] == list(range(500))
    assert Notice("499") in events


def test_a_notice_gives_way_only_to_a_newer_one_and_only_where_too_many_wait() -> None:
    ticket = new_ticket(3)
    for event in (Started(5, 0, 0.1), Notice("a"), Notice("b"), Notice("c"), Queued(1)):
        ticket.publish(event)
    ticket.publish(END)
    assert list(ticket) == [Started(5, 0, 0.1), Notice("b"), Notice("c"), Queued(1), END]


def test_progress_replaces_its_predecessor() -> None:
    ticket = new_ticket()
    for event in (Queued(2), Queued(1), PrefillProgress(1, 9), PrefillProgress(9, 9)):
        ticket.publish(event)
    ticket.publish(END)
    assert list(ticket) == [Queued(1), PrefillProgress(9, 9), END]


def test_the_error_comes_after_the_events_and_on_every_further_read() -> None:
    ticket = new_ticket()
    ticket.publish(step(0))
    ticket.fail(UsageError("bad"))
    ticket.publish(step(1))  # too late: nothing follows an end
    assert next(ticket) == step(0)
    for _ in range(2):
        with pytest.raises(UsageError, match="bad"):
            next(ticket)


def test_the_first_end_counts() -> None:
    ticket = new_ticket()
    ticket.publish(END)
    ticket.fail(UsageError("too late"))
    assert list(ticket) == [END] and ticket.done


@pytest.mark.timeout(30)
def test_a_waiting_reader_is_woken_by_an_event_and_by_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_module, "WAIT_S", 3600.0)  # it need not look for itself
    ticket = new_ticket()
    for act, expected in ((partial(ticket.publish, step(7)), [step(7)]), (partial(ticket.publish, END), [END])):
        timer = threading.Timer(0.05, act)
        timer.start()
        assert list(islice(ticket, 1)) == expected
        timer.join()
