"""Reports of cards: those that are shipped, and lines that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import to_builtins

from dflash_local.catalog.registry import load
from dflash_local.catalog.reports import FOLDER, read_report, reports
from dflash_local.errors import SettingsError
from dflash_local.planner.cards import file_stem

GOOD: dict[str, Any] = to_builtins(next(each for each in reports() if each.certificate is not None))


def test_shipped_reports_are_of_known_pairs_and_stand_in_the_file_of_their_card() -> None:
    known = {row.name for row in load().rows}
    assert {each.pair for each in reports()} <= known
    for file in FOLDER.iterdir():
        lines = [read_report(line, file.name) for line in file.read_text(encoding="utf-8").splitlines()]
        assert lines and {f"{file_stem(each.card)}.jsonl" for each in lines} == {file.name}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("card", "<img src=x onerror=alert(1)>", "card must be up to 80 letters"),
        ("card", "H100 | 9999 |", "card must be up to 80 letters"),
        ("card", "/home/ann/card", "card must be up to 80 letters"),
        ("pair", "../../etc/passwd", "pair must be a pair of the registry"),
        ("pair", ["Qwen/Qwen3-8B"], "pair must be a pair of the registry"),
        ("plain", 1e300, "plain must be a number from 0.001 to 1,000,000"),
        ("plain", True, "plain must be a number"),
        ("plain", float("nan"), "plain must be a number"),
        ("accepted", [1.5], "accepted[0] must be a number from 0 to 1"),
        ("accepted", [0.5] * 1000, "accepted must be a list"),
        ("tasks", [{"task": "x\u001b[2J", "plain": 1, "drafted": 1}], "tasks[0].task must be up to 80 letters"),
        ("certificate", {"sha256": "yes", "strength": "strict"}, "certificate.sha256 must be a SHA-256"),
        ("versions", {str(n): "1" for n in range(100)}, "versions must be"),
        ("schema", 2, "schema must be"),
        ("user", "ann", "user is unknown"),
        ("date", "today" * 2000, "has 1"),
    ],
)
def test_a_hostile_line_is_refused_in_one(key: str, value: object, told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_report(json.dumps({**GOOD, key: value}), "h100.jsonl line 3")
    message = str(refused.value)
    assert (
        message.startswith("h100.jsonl line 3: ") and told in message and "\n" not in message and "\x1b" not in message
    )


@pytest.mark.parametrize("line", ["", "[]", "{", "9" * 500, "[" * 5000, json.dumps(GOOD)[:-1]])
def test_what_is_no_object_is_refused(line: str) -> None:
    with pytest.raises(SettingsError, match="^h100.jsonl line 1"):
        read_report(line, "h100.jsonl line 1")
