"""The lines of a pull: widths, rates, and nothing that could move a cursor by itself."""

from __future__ import annotations

import io
import re

import pytest

from dflash_local.cli.console import Console
from dflash_local.cli.progress import PullLines
from dflash_local.events import Notice, PullProgress
from dflash_local.tables import GIB
from tests.cli.conftest import Terminal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(columns: int, live: bool) -> tuple[PullLines, io.StringIO, Clock]:
    err, clock = (Terminal() if live else io.StringIO()), Clock()
    console = Console({"TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}, out=io.StringIO(), err=err)
    return PullLines(console, {"a/target": 10 * GIB, "b/drafter": 2 * GIB}, clock), err, clock


def test_off_a_terminal_a_line_comes_every_ten_seconds_and_at_each_end() -> None:
    show, err, clock = screen(80, live=False)
    for second in range(26):
        clock.now = float(second)
        show(PullProgress("a/target", second * GIB // 5, 10 * GIB))
    show(PullProgress("b/drafter", 2 * GIB, 2 * GIB))
    show(Notice("the line was cut", "warning"))
    show.finish()
    lines = err.getvalue().splitlines()
    assert lines[0] == "a/target: 2.00 GiB of 10.00 GiB; in all 16%, 0.20 GiB/s, 50 s left"
    assert lines[2:] == ["b/drafter: 2.00 GiB, all here", "warning: the line was cut"] and len(lines) == 4
    assert "\x1b" not in err.getvalue() and "\r" not in err.getvalue()


@pytest.mark.parametrize("columns", [24, 80, 140])
def test_on_a_terminal_lines_are_rewritten_and_never_too_wide(columns: int) -> None:
    show, err, clock = screen(columns, live=True)
    for second in range(6):
        clock.now = float(second)
        show(PullProgress("a/target", second * GIB, 10 * GIB))
        show(PullProgress("b/drafter", second * GIB // 5, 2 * GIB))
    show(Notice("b\x1b]0;x\x07ad news", "warning"))
    show.finish()
    text = err.getvalue()
    assert set(re.findall(r"\x1b\[[0-9;?]*[A-Za-z]", text)) == {"\x1b[3A", "\x1b[K", "\x1b[J"} and "\x07" not in text
    assert "ad news\na/target" in text, "the lines are drawn below what was said, not over it"
    pieces = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text).split("\n")
    board = [piece for piece in pieces if "news" not in piece]
    assert max(map(len, board)) < columns and "warning: b␛]0;x␇ad news" in text
    assert ("##" in text) is (columns == 140)
    if columns >= 80:
        assert re.search(r"total +.* 50%  +6.00 GiB of  +12.00 GiB  1.20 GiB/s  5 s left", pieces[-2])


def test_what_lay_here_says_nothing_about_the_speed_and_what_is_verified_is_told() -> None:
    show, _, clock = screen(140, live=False)
    show(PullProgress("a/target", 5 * GIB, 10 * GIB, 2 * GIB, 5 * GIB))
    clock.now = 2.0
    show(PullProgress("a/target", 6 * GIB, 10 * GIB, 2 * GIB, 5 * GIB))
    assert show.lines()[-1].endswith("0.50 GiB/s  12 s left  2.00 GiB verified")


def test_a_repository_of_no_bytes_counts_as_done() -> None:
    err = io.StringIO()
    show = PullLines(Console({"COLUMNS": "80"}, out=io.StringIO(), err=err), {"a/target": 0, "b/drafter": 50})
    assert [re.findall(r"\d+%", line) for line in show.lines()] == [["100%"], ["0%"], ["0%"]]
    show(PullProgress("a/target", 0, 0))
    assert err.getvalue() == "", "nothing of it has come"
