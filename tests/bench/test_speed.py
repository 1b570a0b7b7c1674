"""The comparison of AR and DFlash: counts that can be checked, on a golden pair."""

from __future__ import annotations

import pytest

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.speed import Comparison, SpeedOptions, compare, presented, rows
from tests.bench.sessions import KV_ONLY, golden_cases, golden_pair, golden_session


def prompts() -> list[Prompt]:
    return [Prompt(kind, ids=tuple(case["prompt_ids"])) for kind, case in zip("aab", golden_cases(KV_ONLY))]


@pytest.fixture(scope="module")
def found() -> list[Comparison]:
    return compare(golden_session(KV_ONLY), prompts(), SpeedOptions(max_new_tokens=72))


def test_both_ways_write_the_golden_text(found: list[Comparison]) -> None:
    for one, case in zip(found, golden_cases(KV_ONLY)):
        assert list(one.ar.ids) == list(one.dflash.ids) == case["output_ids"]
        assert list(one.dflash.stats.acceptance_lengths) == case["acceptance_lengths"]
        assert one.ar.cycles and all(cycle.rows == 1 for cycle in one.ar.cycles)


def test_rows_sum_up_their_kinds(found: list[Comparison]) -> None:
    one, other, total = rows(found)
    assert (one.kind, other.kind, total.kind) == ("a", "b", "total")
    assert (one.prompts, other.prompts, total.prompts) == (2, 1, 3)
    lengths = [n for case in golden_cases(KV_ONLY)[:3] for n in case["acceptance_lengths"]]
    assert total.cycles == len(lengths)
    assert total.mean_acceptance_length == pytest.approx(sum(lengths) / len(lengths))
    turns = [72 / len(case["acceptance_lengths"]) for case in golden_cases(KV_ONLY)[:3]]
    assert total.turn_acceptance_length == pytest.approx(sum(turns) / 3)
    assert total.acceptance_per_position[0] == pytest.approx(sum(n > 1 for n in lengths) / len(lengths))
    assert total.ar_decode_s == pytest.approx(sum(w.ar.stats.decode_s for w in found))
    assert total.ratio == pytest.approx(total.ar_decode_s / total.dflash_decode_s)
    assert total.equal == 3


def test_one_token_has_no_speed_and_no_ratio() -> None:
    options = SpeedOptions(max_new_tokens=1)
    session = golden_session(KV_ONLY)
    report, lines = presented(golden_pair(KV_ONLY), session.facts, compare(session, prompts()[:1], options), options)
    assert report["rows"][0]["ratio"] is None
    (line,) = [line for line in lines if line.endswith("1/1")]
    assert line.split() == ["a", "1", "1", "-", "-", "-", "-", "-", "1/1"]


def test_the_report_holds_what_the_table_shows(found: list[Comparison]) -> None:
    session_facts = golden_session(KV_ONLY).facts
    options = SpeedOptions(max_new_tokens=72)
    report, lines = presented(golden_pair(KV_ONLY), session_facts, found, options)
    assert report["report"] == "dflash bench" and report["note"] is None
    assert len(report["prompts"]) == 3 and report["rows"][-1]["kind"] == "total"
    assert any("text equal in 3 of 3" in line for line in lines)
    assert not any("toy" in line for line in lines)
