"""``dflash demo``: both runs on one session, marks, histogram, and figures of this very run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_local import terminal
from dflash_local.events import Piece, Step
from dflash_local.request import Request
from tests.cli.conftest import Cli, Opened
from tests.service.scripted import HELLO, ScriptedSession


def test_the_runs_share_a_session_and_a_prompt_and_are_warmed_up(cli: Cli, opened: Opened) -> None:
    result = cli("demo")
    assert result.code == 0, result.err
    requests = opened.session.requests
    assert [request.mode for request in requests] == ["ar", "ar", "dflash", "dflash"]
    assert len(opened.sessions) == 1 and len({request.messages for request in requests}) == 1
    assert [request.limits.max_new_tokens for request in requests] == [16, 256, 16, 256]
    assert all(request.sampling.greedy for request in requests)


def test_tokens_are_marked_without_colour_and_the_marks_explained(cli: Cli, opened: Opened) -> None:
    out = cli("demo").out
    marked = out.split("by the target itself›:\n")[1]
    assert marked.startswith("‹Hello›, wor‹ld›!‹↵›\n")
    assert "Hello, world!\n" in out.split("with the drafter")[0], "the plain run is not marked"
    assert "\x1b" not in out


def test_colour_comes_on_top_where_it_is_wanted(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "colour_enabled", lambda _stream, _environ: True)
    out = cli("demo").out
    assert "\x1b[33m‹Hello›\x1b[0m\x1b[32m, wor\x1b[0m" in out


def test_histogram_equality_ratio_and_the_word_toy(cli: Cli, opened: Opened) -> None:
    out = cli("demo").out
    bars = {int(n): int(count) for n, count in re.findall(r"^ +(\d+) \S* *(\d+)$", out, re.M)}
    assert bars == {1: 0, 2: 1, 3: 1, 4: 0}
    assert "identical: yes" in out and "1.83x wall clock, 2.00x decode speed" in out
    assert "toy pair: first-run material, not a speed claim" in out


def test_a_difference_is_told_with_its_place(cli: Cli, opened: Opened) -> None:
    class Wrong(ScriptedSession):
        def generate(self, request: Request, *rest):  # type: ignore[no-untyped-def]
            first = HELLO[0] if request.mode == "ar" else Step((Piece("Hullo"),), (10, 9), 0, 0, 0, 0.0)
            self.steps = [first, Step((Piece("!"),), (14,), 0, 0, 0, 0.0)]
            yield from super().generate(request, *rest)

    opened.make = lambda _pair: Wrong()
    assert "identical: no; first difference at token 1, margin" in cli("demo").out
    content = cli("demo", "--json").json
    assert content["identical"] is False and content["first_difference"] == 1


def test_json_is_one_object_with_both_runs(cli: Cli, opened: Opened) -> None:
    result = cli("demo", "demo-hybrid", "--json")
    content = result.json
    assert result.err == "" and content["pair"] == "demo-hybrid" and content["identical"] is True
    assert content["dflash"]["acceptance_lengths"] == [3, 2] and content["ar"]["token_ids"] == [10, 11, 12, 13, 14, 15]
    assert content["wall_clock_ratio"] == pytest.approx(0.11 / 0.06) and "toy" in content["note"]


def test_only_pairs_of_the_first_run_are_shown(cli: Cli, opened: Opened, local: Path) -> None:
    result = cli("demo", str(local))
    assert result.code == 2 and "no pair of the first run" in result.err and not opened.sessions
