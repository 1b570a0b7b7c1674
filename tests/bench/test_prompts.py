"""Prompt lists: the user's file is refused by line, a certificate takes one of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.bench.prompts import Prompt, a_few, built_in, from_file, held_out
from dflash_local.errors import CheckpointError, UsageError


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '\ufeff{"prompt": "caf\u00e9", "answer": "x", "kind": "k"}\n\n{"prompt_ids": [1, 2]}\n', encoding="utf-8"
    )
    assert from_file(file) == (Prompt("k", "caf\u00e9", (), "x"), Prompt("all", "", (1, 2), None))


@pytest.mark.parametrize(
    "line",
    ["[1]", "{", '{"prompt": ""}', '{"prompt": "a", "prompt_ids": [1]}', '{"prompt": 3}', '{"prompt_ids": ["a"]}',
     '{"prompt": "a", "answer": 4}', '{"prompt_ids": [true]}'],
)  # fmt: skip
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="line 2"):
        from_file(file)


def test_an_absent_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        from_file(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="0 prompts"):
        from_file(tmp_path / "empty.jsonl")


def test_held_out_prompts_belong_to_the_installation(tmp_path: Path) -> None:
    file = tmp_path / "heldout.json"
    with pytest.raises(CheckpointError, match="missing"):
        held_out(file)
    file.write_text(json.dumps([{"kind": "code", "prompt": "p", "answer": "a"}]), encoding="utf-8")
    assert held_out(file) == (Prompt("code", "p", (), "a"),)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no prompts"):
        held_out(file)


def test_a_few_are_one_of_each_kind_first() -> None:
    prompts = [Prompt(kind, f"{kind}{i}") for kind in "ab" for i in range(5)]
    chosen = a_few(prompts, 4)
    assert [p.text for p in chosen] == ["a0", "b0", "a1", "b1"]
    assert a_few(built_in(), 10) == built_in()
    assert len(a_few(prompts, 1)) == 1
