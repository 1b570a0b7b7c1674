"""What a drafter is to learn from: saved chats, prompts and messages of a file, and what is none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app.adapting import MOST_TURNS, TextSource, read_source
from dflash_local.cli.main import main
from dflash_local.errors import UsageError
from dflash_local.store.history import ChatFile
from dflash_local.store.paths import chats_folder
from dflash_local.store.records import Turn
from dflash_local.transcripts.read import ReadReport


def source(name: str) -> TextSource:
    return read_source(name, settings.load(), ReadReport(), lambda _text, _fraction: None)


def lines(file: Path, *rows: object) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def saved(turns: int) -> None:
    folder = chats_folder(settings.load())
    assert folder is not None
    told = [Turn("assistant" if number % 2 else "user", f"text {number}") for number in range(2 * turns)]
    ChatFile.create(folder, "demo", "Be kind", told).close()


def test_saved_chats_are_conversations_turn_by_turn() -> None:
    saved(3)
    saved(MOST_TURNS + 4)
    found = source("chats")
    assert found.conversations is not None and found.told.startswith(
        "2 conversations with 11 prompts of your saved chats"
    )
    short, long = sorted(found.conversations, key=lambda each: len(each.prompts))
    assert [each.role for each in short.prompts[-1]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [each.content for each in short.prompts[0]] == ["Be kind", "text 0"] and len(long.prompts) == MOST_TURNS


def test_prompts_and_messages_of_a_file(tmp_path: Path) -> None:
    prompts = source(lines(tmp_path / "p.jsonl", *({"prompt": f"question {n}", "kind": "law"} for n in range(40))))
    assert prompts.conversations is not None and {each.kind for each in prompts.conversations} == {"law"}
    assert 2 <= sum(each.held_out for each in prompts.conversations) <= 16, "about a fifth"
    told = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant", "user")]
    messages = source(lines(tmp_path / "m.jsonl", {"messages": told}, {"messages": told[:2]}))
    assert messages.conversations is not None
    assert sorted(len(each.prompts) for each in messages.conversations) == [1, 3]


def test_what_is_no_source_is_a_line(tmp_path: Path) -> None:
    for name, words in (
        ("chats", "no chat is saved here yet"),
        (str(tmp_path / "none"), "there is no such file or folder"),
        (str(tmp_path), "no conversation in"),
        (lines(tmp_path / "b.jsonl", {"messages": [{"role": "nobody", "content": "x"}]}), "line 1 holds no messages"),
        (lines(tmp_path / "c.jsonl", {"prompt": "x"}, {"prompt": 7}), "line 2: prompt and kind must be text"),
    ):
        with pytest.raises(UsageError, match=words):
            source(name)
    assert source("self").conversations is None


def test_saved_chats_are_not_read_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    saved(3)
    assert main(["adapt", "demo", "--no-adaptation"]) == 2
    assert "nobody can be asked whether your saved chats may be read" in capsys.readouterr().err
