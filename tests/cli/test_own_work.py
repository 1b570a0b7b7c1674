"""``dflash plan --from``: text and JSON, the options of a plan, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import TARGET, Cli
from tests.fake_hub import FakeHub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a chat of two turns whose second prompt is long, and a broken file."""
    texts = ("hi", "hello", "a word " * 3000, "a word a word a word")
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    found = tmp_path / "work"
    found.mkdir()
    (found / "talk.json").write_text(json.dumps({"model": "m", "system": "", "messages": messages}), encoding="utf-8")
    (found / "broken.json").write_text("{", encoding="utf-8")
    return found


def test_it_says_what_the_turns_are_and_how_long_they_take(cli: Cli, folder: Path) -> None:
    told = cli("plan", "--from", str(folder), "--gpu", "RTX 4090")
    flat = " ".join(told.out.split())
    assert told.code == 0 and f"warning: {folder / 'broken.json'}: no JSON" in told.err
    assert (
        len(told.err.splitlines()) == 1 and str(folder) not in told.out and "a word" not in told.out.partition("\n")[0]
    )
    assert "2 turns in 1 conversation: dflash (1)" in flat and "prompt 1 tokens in the median, 6,003 at" in flat
    assert "tokens: estimated" in flat and "Codex: what is sent is longer" in flat
    assert "seconds a turn on RTX 4090" in flat and "predicted, fitted to measurements of one NVIDIA H200" in flat
    assert flat.count("dflash chat ") == 3
    unknown = " ".join(cli("plan", "--from", str(folder), "--gpu", "RTX 3060").out.split())
    assert "no speed is predicted for this machine; --gpu NAME plans" in unknown


def test_json_has_the_same_figures(cli: Cli, folder: Path) -> None:
    found = cli("plan", "Qwen/Qwen3.5-9B", "--from", str(folder), "--gpu", "RTX 4090", "--json").json
    work, (pair,) = found["work"], found["pairs"]
    assert work["turns"] == 2 and work["prompt_tokens"] == {"median": 1, "p95": 6003}
    assert 0 < work["lookup_drafted_share"] < 1 and work["tokens"].startswith("estimated")
    assert pair["pair"] == "Qwen/Qwen3.5-9B" and pair["context"] >= work["context"]
    seconds = pair["predicted_turn_seconds"]["p95"]
    assert 0 < seconds["first_token"] < seconds["fastest"] <= seconds["slowest"] <= seconds["plain"]
    assert len(found["files"]["left_out"]) == 1 and "H200" in pair["prediction_basis"]
    plain = cli("plan", "Qwen/Qwen3.5-9B", "--from", str(folder), "--gpu", "RTX 4090", "--mode", "ar", "--json").json
    assert plain["pairs"][0]["predicted_turn_seconds"]["p95"]["fastest"] is None


def test_what_does_not_hold_the_turns_is_refused(cli: Cli, folder: Path) -> None:
    told = cli("plan", "demo", "--from", str(folder), "--gpu", "RTX 4090")
    assert told.code == 5 and told.out == "" and "tokens: those of demo" in told.err
    assert "error: demo does not fit here with the " in told.err and "--context N" in told.err
    tiny = cli("plan", "--from", str(folder), "--gpu-memory", "1", "--json")
    error = json.loads(tiny.err.splitlines()[-1])
    assert tiny.code == 5 and error["error"]["message"].startswith("no pair fits") and error["work"]["turns"] == 2
    server = cli("plan", "moonshotai/Kimi-K2.5", "--from", str(folder), "--gpu", "H200")
    assert server.code == 5 and "on a server only" in server.err and "turns" not in server.err


def test_tokens_are_those_of_a_pair_that_is_here(cli: Cli, folder: Path, toy_hub: FakeHub) -> None:
    assert cli("pull", "toy-9b", "--yes").code == 0
    told = cli("plan", "--from", str(folder), "--gpu", "RTX 4090", "--context", "2048")
    assert told.code == 0 and f"tokens: those of {TARGET};" in told.out and "a context of 2,048" in told.out


def test_a_folder_without_turns_and_a_plan_of_nothing_are_refused(cli: Cli, tmp_path: Path) -> None:
    empty = cli("plan", "--from", str(tmp_path), "--gpu-memory", "24")
    assert empty.code == 2 and "no turn of a model in 0 transcripts" in empty.err and "Claude Code" in empty.err
    absent = cli("plan", "--from", str(tmp_path / "x"), "--gpu-memory", "24")
    assert absent.code == 2 and "there is no such folder or file" in absent.err
    assert "Missing argument 'MODEL'" in cli("plan").err
