"""What came of a reply: its texts by channel, and whether it is kept."""

from __future__ import annotations

import pytest

from dflash_local.events import Finished, FinishReason, Piece, Step, Usage
from dflash_local.service.gathered import Gathered
from tests.service.scripted import STATS


def step(*pieces: Piece) -> Step:
    return Step(pieces, (1,) * len(pieces), 0, 0, 0, 0.0)


def test_texts_are_told_apart_and_calls_of_tools_belong_to_the_answer() -> None:
    reply = Gathered()
    reply.gather(step(Piece("hm", "thinking"), Piece("I "), Piece("add(1)", "tool")))
    reply.gather(step(Piece("m", "thinking"), Piece("ask: ")))
    assert (reply.thinking, reply.text) == ("hmm", "I ask: add(1)")


@pytest.mark.parametrize(
    ("reason", "pieces", "kept"),
    [
        ("stop", (), True),
        ("cancelled", (), False),
        ("cancelled", (Piece("so", "thinking"),), True),
        ("cancelled", (Piece("add(1)", "tool"),), True),
        (None, (Piece("far"),), False),
    ],
)
def test_what_ended_is_kept_and_what_was_stopped_if_anything_came(
    reason: FinishReason | None, pieces: tuple[Piece, ...], kept: bool
) -> None:
    reply = Gathered()
    reply.gather(step(*pieces))
    if reason is not None:
        reply.gather(Finished(reason, Usage(1, 1), STATS))
    assert reply.worth_keeping == kept and reply.stopped == (reason == "cancelled")
