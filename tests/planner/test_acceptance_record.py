"""What drafting was worth in the replies of this machine, and what predictions make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.planner.acceptance_record import ENOUGH, MANY, AcceptanceRecord, Count
from dflash_local.planner.speed import Prediction, Times

NAME = "Qwen/Qwen3.5-9B"


def test_replies_are_counted_by_target_and_become_one_length(tmp_path: Path) -> None:
    record, before = AcceptanceRecord(tmp_path), Prediction((Times(1024, 3.0, 9.0, 16),), None, "a table")
    record.add(NAME, ENOUGH - 4, {8: ENOUGH // 4 - 1})
    assert record.read()[NAME].predict(before) is before, "too few"
    record.add(NAME, 8, {1: 1, 8: 1})
    record.add("another/one", 0, {})
    found = AcceptanceRecord(tmp_path).read()
    assert found == {NAME: Count(ENOUGH + 4, {1: 1, 8: ENOUGH // 4})}
    lengths = found[NAME].predict(before).acceptance
    assert lengths is not None and lengths.low == lengths.high == pytest.approx(4.0)
    assert lengths.source == f"measured here over {ENOUGH + 4} tokens"


def test_what_was_written_lately_weighs_more() -> None:
    count = Count(0, {})
    for length, cycles in ((2, MANY), (6, MANY // 3)):
        for _ in range(cycles // 64):
            count = count.plus(64 * length, {4: 64})
    assert count.tokens <= MANY and count.tokens / count.cycles[4] > 3.5, "4 were the mean of all"


@pytest.mark.parametrize("replies", [[MANY - 5_000, 80_000], [3 * MANY], [80_000] * 9], ids=["later", "first", "often"])
def test_no_reply_is_too_long_for_the_record(tmp_path: Path, replies: list[int]) -> None:
    record = AcceptanceRecord(tmp_path)
    for tokens in replies:
        record.add(NAME, tokens, {1: tokens - 4_000, 4: 1_000})
        record.add("another/one", tokens, {1: tokens})
    found = record.read()
    assert found[NAME].tokens == found["another/one"].tokens == MANY
    assert found[NAME].cycles[4] / found[NAME].cycles[1] == pytest.approx(
        1_000 * len(replies) / (sum(replies) - 4_000 * len(replies)), rel=0.1
    )


DAMAGED = (
    *("", "[]", '{"a": [1, 2]}', '{"a": {"tokens": 4}}', '{"a": {"tokens": 4, "cycles": []}}'),
    *('{"a": {"tokens": 4, "cycles": {"x": 1}}}', '{"a": {"tokens": 4, "cycles": {"4": "1"}}}'),
    *('{"a": {"tokens": 4, "cycles": {"4": -1, "5": 2}}}', '{"a": {"tokens": NaN, "cycles": {"4": 1}}}'),
    '{"a": {"tokens": 1' + "0" * 400 + ', "cycles": {"4": 1}}}',
)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_counts_nothing_and_is_written_anew(tmp_path: Path, content: str) -> None:
    record = AcceptanceRecord(tmp_path)
    assert record.path is not None
    record.path.write_text(content)
    assert record.read() == {}
    record.add(NAME, 3, {4: 1})
    assert json.loads(record.path.read_text()) == {NAME: {"tokens": 3, "cycles": {"4": 1}}}
    AcceptanceRecord(None).add(NAME, 3, {4: 1})
