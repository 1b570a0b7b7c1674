"""``dflash race`` off a terminal: both replies, the table, one JSON object."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from dflash_local import terminal
from dflash_local.app.examples import built_in_prompt
from dflash_local.errors import ContextError
from dflash_local.events import Piece, Step
from dflash_local.report.race_file import SAVED
from dflash_local.request import Request
from tests.cli.conftest import Cli, Opened
from tests.service.scripted import HELLO, PartingSession, ScriptedFacts, ScriptedSession


def test_both_replies_a_table_and_the_verdict(cli: Cli, opened: Opened) -> None:
    result = cli("race", "demo", "hi")
    assert result.code == 0, result.err
    out = result.out
    assert out.index("plain, one token at a time:\nHello, world!\n") < out.index("drafted; ")
    assert (
        "time                      0.11 s      0.06 s" in out and "acceptance length              -        2.50" in out
    )
    bars = {int(n): int(count) for n, count in re.findall(r"^ +(\d+) \S* *(\d+)$", out, re.M)}
    assert bars == {1: 0, 2: 1, 3: 1, 4: 0}
    assert "identical: yes" in out and "1.83x wall clock, 2.00x decode speed" in out
    assert "toy pair: first-run material, not a speed claim" in out


def test_the_runs_share_a_session_and_a_prompt_and_are_warmed_up(cli: Cli, opened: Opened) -> None:
    assert cli("race").code == 0
    requests = opened.session.requests
    assert [request.mode for request in requests] == ["ar", "ar", "dflash", "dflash"]
    assert len(opened.sessions) == 1 and len({request.messages for request in requests}) == 1
    assert [request.limits.max_new_tokens for request in requests] == [16, 256, 16, 256]
    assert all(request.sampling.greedy for request in requests)


def test_the_targets_own_tokens_are_marked_and_the_marks_explained(
    cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = cli("race").out
    assert out.split("by the target itself›:\n")[1].startswith("‹Hello›, wor‹ld›!‹↵›\n") and "\x1b" not in out
    monkeypatch.setattr(terminal, "colour_enabled", lambda _stream, _environ: True)
    assert "\x1b[33m‹Hello›\x1b[0m\x1b[32m, wor\x1b[0m" in cli("race").out


def test_thinking_is_not_marked(cli: Cli, opened: Opened) -> None:
    thought = Step((Piece("hm", "thinking", "bonus"),), (9,), 0, 0, 0, 0.0)
    opened.make = lambda _pair: ScriptedSession(steps=[thought, *HELLO])
    told = cli("race", "demo", "hi")
    assert "‹hm›" not in told.out + told.err and "hm" in told.err and "‹Hello›" in told.out


def test_json_is_one_object(cli: Cli, opened: Opened) -> None:
    result = cli("race", "demo", "hi", "--json", "--seed", "5", "--temperature", "0.5")
    content = json.loads(result.out)
    assert result.err == "" and content["pair"] == "demo" and content["prompt"] == "hi" and content["seed"] == 5
    assert content["identical"] is True and content["ar"]["token_ids"] == content["dflash"]["token_ids"]
    assert opened.session.requests[-1].sampling.temperature == 0.5


def test_a_race_is_saved_as_each_kind_over_what_was_there(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    files = [tmp_path / f"race{suffix}" for suffix in SAVED]
    files[0].write_text("old")
    result = cli("race", "demo", "hi", "--seed", "5", *(word for file in files for word in ("--save", str(file))))
    assert result.code == 0 and all(f"race saved: {file}" in result.err for file in files)
    page, cast, content = (file.read_text(encoding="utf-8") for file in files)
    assert page.startswith("<!doctype html>") and json.loads(cast.splitlines()[0])["version"] == 2
    found = json.loads(content)
    assert found["command"] == "dflash race demo --seed 5 --max-new-tokens 256 --no-think hi"
    assert found["machine"]["cores"]
    assert found["identical"] is True and found["note"] == "toy pair: first-run material, not a speed claim"


def test_what_cannot_be_saved_is_refused_before_anything_is_loaded(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    other = cli("race", "demo", "hi", "--save", "race.gif")
    assert other.code == 2 and other.err.splitlines()[1] == "hint: end it in .html, .cast or .json"
    (tmp_path / "a.json").mkdir()
    assert "a.json is a folder" in cli("race", "demo", "hi", "--save", str(tmp_path / "a.json")).err
    assert not opened.sessions


def test_the_prompt_may_be_piped_in_or_left_out(cli: Cli, opened: Opened) -> None:
    cli("race", "demo", "say:", stdin="this")
    assert opened.session.requests[-1].messages[-1].content == "say:\n\nthis"
    cli("race", stdin="")
    assert opened.session.requests[-1].messages[-1].content == built_in_prompt()


def test_a_difference_is_told_and_the_exit_code_stays_0(cli: Cli, opened: Opened) -> None:
    class Wrong(ScriptedSession):
        def generate(self, request: Request, *rest):  # type: ignore[no-untyped-def]
            self.steps = HELLO if request.mode == "ar" else HELLO[:2]
            yield from super().generate(request, *rest)

    opened.make = lambda _pair: Wrong()
    result = cli("race", "demo", "hi")
    assert result.code == 0 and "identical: no; first difference at token 4, margin: dflash certify" in result.out


def test_the_margin_of_a_difference_is_told_in_lines_and_in_json(cli: Cli, opened: Opened) -> None:
    opened.make = lambda _pair: PartingSession()
    assert "first difference at token 1, margin 0.03; dflash certify" in cli("race", "demo", "hi").out
    content = cli("race", "demo", "hi", "--json").json
    assert content["first_difference"] == 1 and content["margin"] == pytest.approx(0.03)
    sampled = cli("race", "demo", "hi", "--json", "--temperature", "0.5").json
    assert sampled["first_difference"] == 1 and sampled["margin"] is None is sampled["margin_over"]


def test_errors_have_their_codes(cli: Cli, opened: Opened, local: Path) -> None:
    assert cli("race", "demo", "hi", "--temperature", "9").code == 2
    assert cli("race", str(local), "hi").code == 2, "no drafter is known"
    opened.make = lambda _pair: ScriptedSession(ScriptedFacts(has_tokenizer=False))
    assert "no tokenizer" in cli("race", "demo", "hi").err
    opened.make = lambda _pair: ScriptedSession(faults=[ContextError("too long")])
    failed = cli("race", "demo", "hi", "--json")
    assert failed.code == 2 and failed.out == "" and "too long" in failed.err


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals as on POSIX")
def test_ctrl_c_ends_it_with_130(cli: Cli, opened: Opened) -> None:
    def press(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)

    opened.make = lambda _pair: ScriptedSession(on_step=press, steps=HELLO * 400)
    result = cli("race", "demo", "hi")
    assert result.code == 130 and "stopped" in result.err
