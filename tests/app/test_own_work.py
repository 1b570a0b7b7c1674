"""Figures of transcripts whose answer is known by hand: here a character is a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.app.own_work import Work, read_work
from dflash_local.app.work_tokens import CHUNK, work_tokens
from dflash_local.catalog import bundled
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.planner.turn_speed import TurnSize
from dflash_local.settings import load
from dflash_local.transcripts.read import ReadReport


def work_of(folder: Path) -> Work:
    return read_work(folder, lambda text: [*map(ord, text)], ReadReport(), lambda _text, _part: None)


def put_chat(path: Path, *texts: str, thinking: str = "") -> None:
    """An exported chat of prompts and replies in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text, "thinking": thinking} for at, text in enumerate(texts)]
    path.write_text(json.dumps({"model": "m", "system": "", "messages": messages}), encoding="utf-8")


def test_sizes_reuse_and_copies(tmp_path: Path) -> None:
    put_chat(tmp_path / "a.json", "abcdefgh", "abcdefgh", "xyz", "xyz!")
    work = work_of(tmp_path)
    assert work.turns == [TurnSize(8, 0, 8), TurnSize(19, 16, 4)]
    # The first reply: a from the prompt, then b and c alone, then copies behind abc (def, and g) and behind efg (h).
    # The second: x, y and z alone, then ! alone, since nothing stood behind the first xyz but x: that is no copy right.
    assert work.drafted == 3 + 1 and work.cycles == {1: 2 + 1 + 3, 4: 1}
    assert work.reused_share == 16 / 27 and work.drafted_share == 4 / 12
    assert work.at(0.5) == TurnSize(8, 0, 4) and work.at(0.95) == TurnSize(19, 16, 8)
    assert work.context == 23 and work.conversations == {"dflash": 1}
    assert work.as_dict()["prompt_tokens"] == {"median": 8, "p95": 19}


def test_what_was_thought_is_written_and_does_not_come_back(tmp_path: Path) -> None:
    put_chat(tmp_path / "a.json", "question", "answer", "more", "end", thinking="hm")
    assert work_of(tmp_path).turns == [TurnSize(8, 0, 8), TurnSize(18, 8, 5)]


def test_a_prompt_that_begins_otherwise_shares_its_first_tokens(tmp_path: Path) -> None:
    put_chat(tmp_path / "a.json", "abcdefgh", "ok")
    put_chat(tmp_path / "b.json", "abcdefgh", "ok")
    assert [turn.reused for turn in work_of(tmp_path).turns] == [0, 0]  # of another conversation
    tree = {"1": ("user", "abcdefgh", ""), "2": ("assistant", "ok", "1")}
    lines: list[dict[str, object]] = []
    for uuid, (role, text, parent) in {**tree, "3": ("user", "abcdxy", ""), "4": ("assistant", "ok", "3")}.items():
        about = {"uuid": uuid, "sessionId": "s", "parentUuid": parent, "type": role}
        lines.append({**about, "message": {"id": uuid, "content": [{"type": "text", "text": text}]}})
    lines.insert(2, {"type": "system", "subtype": "compact_boundary", "uuid": "c"})
    for name in ("c", "d"):  # the second resumes the first in a file of its own
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    work = work_of(tmp_path)
    assert work.turns[2:] == [TurnSize(8, 0, 2), TurnSize(6, 4, 2)]
    assert work.conversations == {"dflash": 2, "Claude Code": 1}


def test_a_long_reply_is_copied_in_blocks_of_sixteen(tmp_path: Path) -> None:
    text = "".join(chr(at) for at in range(300, 400))
    put_chat(tmp_path / "a.json", text, text)
    work = work_of(tmp_path)
    assert max(work.cycles) == 16 and work.cycles[16] == 5
    assert sum(emitted * count for emitted, count in work.cycles.items()) == 99


def test_tokens_are_those_of_the_pair_that_is_asked_for(own_home: Path) -> None:
    tokenizer = Tokenizer.load(open_source(bundled.find("demo").target))
    assert tokenizer is not None
    with work_tokens("demo", load()) as (encode, words):
        assert words == "those of demo" and encode("def main():") == tokenizer.encode("def main():")
    tokenizer.close()


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3.5-9B"])
def test_without_a_tokenizer_tokens_are_estimated(own_home: Path, model: str | None) -> None:
    with work_tokens(model, load()) as (encode, words):
        assert words.startswith("estimated, ")
        assert len(encode("The quick brown fox, 42!\n")) == 10 and encode("ab cd") == encode("ab") + encode(" cd")
        assert len(encode("a" * (CHUNK + 1))) == -(-CHUNK // 7) + 1
