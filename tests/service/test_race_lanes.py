"""What all views of a race are drawn from: how fast it goes so far, and which rows of both are shown."""

from __future__ import annotations

from dflash_local.events import Piece, Step
from dflash_local.service.race_lanes import Track, level


def test_the_rate_so_far_leaves_out_the_first_step() -> None:
    track = Track()
    track.take(Step((Piece("a"),), (1,), 0, 0, 0, 2.0))
    assert track.line == "▶ 2.00 s · 1 token · – tok/s"
    track.take(Step((Piece("b"),), (2, 3, 4), 3, 2, 4, 2.5))
    assert track.line == "▶ 2.50 s · 4 tokens · 6.0 tok/s" == track.line_in(31)
    assert track.line_in(30) == "▶ 2.50 s · 6.0 tok/s"


def test_the_reply_that_is_ahead_is_followed_while_the_other_one_is_in_view() -> None:
    assert level([2, 9], 10) == 0
    assert level([5, 12], 10) == 2, "the end of the longer one stands in the last row"
    assert level([5, 40], 10) == 2, "three rows of the shorter one stay"
    assert level([10, 60], 30) == 0, "of a high pane a third"
    assert level([40, 40], 10) == 30
