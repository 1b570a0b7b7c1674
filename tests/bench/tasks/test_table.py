"""The six tasks over small files in their true formats; poisoned files are refused in one line."""

from __future__ import annotations

import json

import pytest

from dflash_local.bench.tasks.table import TASKS, chosen
from dflash_local.errors import DownloadError, UsageError
from tests.bench.tasks.data_files import RECORDS, file_of


def test_every_task_makes_its_prompts() -> None:
    turns = {name: [item.turns for item in task.items(file_of(name), None)] for name, task in TASKS.items()}
    assert turns["gsm8k"][0][0].endswith("put your final answer within \\boxed{}.")
    assert turns["math500"][0][0].startswith("Compute") and "boxed" in turns["math500"][0][0]
    assert turns["humaneval"][0][0].startswith("Write a solution") and turns["humaneval"][0][0].endswith("\n```")
    assert len(turns["mbpp"]) == 2, "the test split alone"
    assert turns["mt-bench"][0] == ("Write a post.", "Now shorter.")
    assert turns["alpaca"] == [("Name three colours.",), ("Add them.\n\nInput:\n1 and 2",)]


def test_a_limit_looks_at_no_further_record() -> None:
    raw = file_of("gsm8k") + b"not JSON\n"
    assert len(TASKS["gsm8k"].items(raw, 2)) == 2
    with pytest.raises(DownloadError, match="line 4 is not JSON"):
        TASKS["gsm8k"].items(raw, None)


def _with(name: str, **fields: object) -> bytes:
    return file_of(name, [{**RECORDS[name][0], **fields}])


def _without(name: str, field: str) -> bytes:
    return file_of(name, [{key: value for key, value in RECORDS[name][0].items() if key != field}])


@pytest.mark.parametrize(
    ("name", "raw", "why"),
    [
        ("gsm8k", b"\xff\xfe{}", "not UTF-8"),
        ("gsm8k", b'{"question": ' + b"[" * 100_000, "nested too deep|not JSON"),
        ("gsm8k", _with("gsm8k", extra=json.loads("[" * 80 + "]" * 80)), "more than 64 deep"),
        ("gsm8k", _without("gsm8k", "question"), "question is missing"),
        ("gsm8k", _with("gsm8k", question="a\x1b[2Jb"), "control character"),
        ("gsm8k", _with("gsm8k", question="a\ud800"), "control character"),
        ("gsm8k", _with("gsm8k", question=["a"]), "question is no text"),
        ("gsm8k", _with("gsm8k", question="x" * (2**20 + 1)), "1,048,577 characters"),
        ("gsm8k", b"", "holds no prompts"),
        ("gsm8k", b"[1, 2]\n", "is no object"),
        ("math500", file_of("math500", [RECORDS["math500"][0]] * 2), "two records of one id"),
        ("mbpp", b'{"task_id": 11}', "is no list"),
        ("mbpp", file_of("mbpp", [{**RECORDS["mbpp"][1], "task_id": True}]), "no whole number"),
        ("mt-bench", _with("mt-bench", turns="one"), "turns is no list"),
        ("mt-bench", _with("mt-bench", turns=[]), "turns is no list"),
        ("alpaca", _with("alpaca", instruction=None), "instruction is missing"),
    ],
)
def test_poisoned_files_are_refused_in_one_line(name: str, raw: bytes, why: str) -> None:
    with pytest.raises(DownloadError, match=why) as refused:
        TASKS[name].items(raw, None)
    assert "\n" not in refused.value.message and refused.value.message.isprintable()


def test_names_are_chosen_once_each_and_in_order() -> None:
    assert [task.name for task in chosen("mbpp, GSM8K,mbpp")] == ["mbpp", "gsm8k"]
    with pytest.raises(UsageError, match="'mmlu' is unknown"):
        chosen("gsm8k,mmlu")
