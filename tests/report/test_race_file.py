"""A saved race: its record, its command, the recording's screens (its page: tests/ui/web/test_saved_race.py)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.cells import cell_len

from dflash_local.events import Piece, Step
from dflash_local.report.race_file import SAVED, About, command, record
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.service.race import Race, Racer
from dflash_local.service.service import Service
from tests.service.scripted import HELLO, PartingSession, ScriptedSession

SOURCE = {"pair": "scripted", "note": "toy pair: a toy", "versions": {"dflash-local": "1.2"}}
ABOUT = About("scripted", "say hello", "dflash race scripted", SOURCE)
HOSTILE = "</script><script>document.title = 'taken'</script>\x1b[2J\x9b31m\u202eabc\r\n\t日本語 <!-- "


def race_of(session: ScriptedSession, request: Request | None = None) -> Race:
    with Service.over(session) as service:
        return Racer(service, request or user_request("hi")).run(warm_up=False)


def hostile() -> Race:
    """A race over text that tries to leave its place; more of it than a lane of the recording shows."""
    steps = [Step((Piece(HOSTILE, origin="accepted"), Piece(" x")), (n, n), 1, 1, 2, 0.01 * n) for n in range(40)]
    return race_of(ScriptedSession(steps=steps))


def screens(cast: bytes) -> list[list[str]]:
    """The screen after each event, by the three sequences that recordings use; any other one fails."""
    _, *events = map(json.loads, cast.splitlines())
    rows, seen = [""] * 28, list[list[str]]()
    for _, kind, text in events:
        assert kind == "o"
        for row, shown in re.findall(r"\x1b\[(\d+);1H\x1b\[2K((?:[^\x1b]|\x1b\[[\d;]*m)*)", text):
            rows[int(row) - 1] = re.sub(r"\x1b\[[\d;]*m", "", shown)
        rest = re.sub(r"\x1b\[(\d+;1H|2K|[\d;]*m|\?25[lh]|2J)", "", text)
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", rest)
        seen.append(list(rows))
    return seen


def test_the_record_has_the_figures_of_the_race_and_its_steps_in_time() -> None:
    race = race_of(ScriptedSession())
    content = json.loads(SAVED[".json"](race, ABOUT))
    assert content == json.loads(json.dumps(record(race, ABOUT)))
    assert content["decode_ratio"] == 2.0 and content["pair"] == "scripted" and content["prompt"] == "say hello"
    assert content["headline"] == {"ratio": "2.0x", "under": "2.5 tokens a step, same text", "winner": "dflash"}
    assert content["rows"][2] == ["tok/s", "60.0", "120.0", "2.00x"]
    came = content["events"]["dflash"]
    assert [(step["t_s"], step["tokens"], step["accepted"]) for step in came] == [
        (0.01, 1, 0), (0.02, 3, 2), (0.03, 2, 1)
    ]  # fmt: skip
    assert came[1]["pieces"][1] == {"text": "ld", "channel": "final", "origin": "bonus"}
    assert content["unmeasured"][0] == "Toy pair: a toy."


def test_a_slower_or_other_drafted_reply_is_said() -> None:
    race = race_of(ScriptedSession())
    slower = replace(race, ar=race.dflash, dflash=race.ar)
    assert record(slower, ABOUT)["headline"] == {"ratio": "0.5x", "under": "same text", "winner": "ar"}
    short = replace(race.dflash.finished, stats=replace(race.dflash.finished.stats, tokens_per_s=0.0))  # of one token
    unknown = replace(race, dflash=replace(race.dflash, finished=short))
    assert record(unknown, ABOUT)["headline"]["under"].startswith("by wall clock, 2.5 tokens a step")
    assert unknown.ratios == "this run: 1.83x wall clock" and unknown.winner == "dflash"
    assert unknown.as_dict()["decode_ratio"] is None and unknown.rows[2] == ("tok/s", "60.0", "-", "")
    parted = race_of(PartingSession())
    assert parted.headline[1].startswith("2.5 tokens a step, identical: no; first difference at token 1, margin 0.03")
    steps = tuple(replace(step, token_ids=()) for step in HELLO)
    unnamed = replace(race, dflash=replace(race.dflash, steps=steps), in_server=True)
    assert "identical: yes, as texts" in unnamed.headline[1]
    assert "The server names no tokens, so texts were compared." in record(unnamed, ABOUT)["unmeasured"]


@pytest.mark.parametrize("prompt, end", [("it's", ["it's"]), ("- one", ["--", "- one"])])
def test_the_command_repeats_the_race(prompt: str, end: Sequence[str]) -> None:
    sampled = SamplingParams(temperature=0.5, seed=None)
    request = replace(user_request(prompt, sampling=sampled, limits=Limits(9)), block_size=3, thinking=True)
    words = shlex.split(command("demo", prompt, request, 7, ["--engine", "reference"]))
    own = "--seed 7 --max-new-tokens 9 --temperature 0.5 --block-size 3 --think --engine reference".split()
    assert words == ["dflash", "race", "demo", *own, *end]
    greedy = replace(request, sampling=SamplingParams(top_p=0.8, top_k=20), block_size=None, thinking=False)
    own = "--seed 7 --max-new-tokens 9 --no-think".split()
    assert shlex.split(command("demo", prompt, greedy, 7)) == ["dflash", "race", "demo", *own, *end]


@pytest.mark.parametrize(
    ("sampling", "stop", "lacking"),
    [
        (SamplingParams(temperature=0.7, top_p=0.8, top_k=20), (), "top_k 20, top_p 0.8"),
        (SamplingParams(presence_penalty=1.5, min_p=0.1), (), "presence_penalty 1.5"),
        (SamplingParams(), ("END",), "stop strings"),
    ],
)
def test_a_race_that_no_command_repeats_says_what_it_lacks(
    sampling: SamplingParams, stop: tuple[str, ...], lacking: str
) -> None:
    request = user_request("hi", sampling=sampling, limits=Limits(9, stop))
    assert command("demo", "hi", request, 7) == f"dflash race cannot repeat it: it has no option for {lacking}"


def test_a_recording_is_asciicast_whose_lanes_go_on_to_the_ratio() -> None:
    cast = SAVED[".cast"](race_of(ScriptedSession()), ABOUT)
    header, *events = map(json.loads, cast.splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 100, 28)
    times = [event[0] for event in events]
    assert times == sorted(set(times)) and times[-1] == header["duration"]
    first, *_, last = screens(cast)
    assert "plain" in first[2] and "Hello" not in "".join(first)
    assert last[6].count("Hello, world!") == 2 and last[25].startswith(" 2.0x  2.5 tokens a step, same text")
    assert last[27] == "toy pair: a toy · dflash-local 1.2"
    assert "60.0 tok/s · 6 tokens · 0.11 s · done" in last[4] and "120 tok/s" in last[4]


def test_a_recording_holds_hostile_and_wide_text_inside_its_lanes() -> None:
    seen = screens(SAVED[".cast"](hostile(), ABOUT))
    for rows in seen:
        assert all(cell_len(row) in (0, 100) for row in rows[2:25]), "each lane keeps its frame"
    text = "".join(seen[-1])
    assert "␛[2J" in text and "日本語" in text
    lanes = [row.split("│") for row in seen[-1][6:24]]
    assert all(plain == drafted for _, plain, _, drafted, _ in lanes), "equal lines stand level"
