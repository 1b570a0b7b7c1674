"""The replies of this machine are counted, so that plans of the pair have its own acceptance length."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from dflash_local.app.loading import HeldSession
from dflash_local.events import Finished
from dflash_local.planner.acceptance_record import AcceptanceRecord, Count
from dflash_local.request import Message, Request
from tests.service.scripted import ScriptedSession

REQUEST = Request((Message("user", "hello"),))


def test_a_reply_with_the_pairs_own_block_is_counted(tmp_path: Path) -> None:
    session, record = ScriptedSession(), AcceptanceRecord(tmp_path)
    kept = HeldSession(session, ExitStack(), "a/b", record)
    done = [event for event in kept.generate(REQUEST) if isinstance(event, Finished)]
    lengths = done[0].stats.acceptance_lengths
    assert lengths and record.read() == {"a/b": Count(sum(lengths), len(lengths))}
    kept.close()
    assert session.closed


def test_a_reply_with_another_block_says_nothing_of_the_pairs_own(tmp_path: Path) -> None:
    record = AcceptanceRecord(tmp_path)
    shorter = replace(REQUEST, block_size=3)
    assert list(HeldSession(ScriptedSession(), ExitStack(), "a/b", record).generate(shorter))
    assert record.read() == {}
