"""Results kept by parts, and the figures over them by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.bench.tasks import figures
from dflash_local.bench.tasks.results import Drafted, PromptResult, ResultsFile, ResultsPart, TaskReply

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3-v1-b8" / "expected.json"
REPLY = TaskReply(5, 0, 10, "stop", 0.1, 1.1, 9.0, None, "text", "ids")
IDS = ("1", "2", "3")


def opened(folder: Path) -> ResultsFile:
    return ResultsFile(folder, "demo-prompts-vllm-4", {"server": "vllm"})


def whole(folder: Path) -> ResultsFile:
    """Two prompts in a part that came to its end after two seconds, one in a part that did not."""
    file = opened(folder)
    file.add(PromptResult("1", 1, 1.5, (REPLY,)))
    file.add(PromptResult("2", 1, 2.0, (replace(REPLY, tokens=30, ttft_s=0.3),)))
    file.add(PromptResult("3", 1, 0.5, error="ServerError: no"))
    file.end(ResultsPart(1, 2.0, Drafted(4, 28, 10)))
    file.add(PromptResult("3", 2, 4.0, (replace(REPLY, tokens_per_s=None),)))
    return file


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    file = whole(tmp_path)
    with file.path.open("ab") as stream:
        stream.write(b'{"id": "9"}\n{"ended": {"number": 3}}\n{"id": "1", "tu')
    again = opened(tmp_path)
    assert again.results == file.results and again.parts == file.parts == {1: ResultsPart(1, 2.0, Drafted(4, 28, 10))}
    assert again.next_part == 3 and again.answered(IDS) == 3 and again.answered(["1", "9"]) == 1


def test_throughput_is_of_the_longest_part_and_acceptance_of_whole_ones(tmp_path: Path) -> None:
    found = figures.of_file(whole(tmp_path), IDS)
    assert (found.prompts, found.failed, found.requests, found.parts) == (3, 0, 3, 2)
    assert found.throughput is not None and found.throughput.whole and found.throughput.prompts == {"1", "2"}
    assert found.throughput.tokens_per_s == pytest.approx(40 / 2.0)
    assert (found.accepted.mean, found.accepted.prompts, found.accepted.length) == (1 + 10 / 4, 2, None)
    assert (found.ttft_s.p50, found.ttft_s.p99, found.decode_rates.p50) == (0.1, 0.3, 9.0)
    assert found.end_to_end_rates.p99 == pytest.approx(30 / 1.1)


def test_both_acceptance_lengths_of_replies_that_report_theirs(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for name, drafted in (("1", Drafted(2, 14, 8)), ("2", Drafted(8, 56, 8)), ("3", Drafted(0, 0, 0))):
        file.add(PromptResult(name, 1, 1.0, (replace(REPLY, drafted=drafted),)))
    file.end(ResultsPart(1, 1.0, None, "other requests ran at the same time"))
    found = figures.of_file(file, IDS).accepted
    assert found.length == pytest.approx((5 + 2) / 2) and found.mean == pytest.approx(1 + 16 / 10)
    assert found.source == "reported with each reply"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (ResultsPart(1, 1.0, None, "it was restarted meanwhile"), "it was restarted meanwhile"),
        (None, "the run ended early"),
    ],
)
def test_what_is_not_known_has_its_reason(tmp_path: Path, ended: ResultsPart | None, reason: str) -> None:
    file = opened(tmp_path)
    file.add(PromptResult("1", 1, 3.0, (replace(REPLY, tokens=None),)))
    if ended is not None:
        file.end(ended)
    found = figures.of_file(file, ["1"])
    assert (found.accepted.mean, found.accepted.source) == (None, reason)
    assert found.throughput is not None and found.throughput.tokens_per_s is None, "no token counts"
    assert found.throughput.whole is (ended is not None) and found.end_to_end_rates.p50 is None


def test_a_reply_without_a_token_has_no_first_one_and_no_speed(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add(PromptResult("1", 1, 1.0, (replace(REPLY, tokens=0, ttft_s=0.0, tokens_per_s=None),)))
    empty = figures.of_file(file, ["1"])
    assert empty.ttft_s.p50 is None and empty.end_to_end_rates.p50 is None and empty.latency_s.p50 == 1.1
    file.add(PromptResult("2", 1, 2.0, (REPLY,)))
    found = figures.of_file(file, ["1", "2"])
    assert found.ttft_s.p50 == 0.1 and found.end_to_end_rates.p50 == pytest.approx(10 / 1.1)


def test_nothing_answered_has_no_figures(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add(PromptResult("1", 1, 1.0, error="no"))
    found = figures.of_file(file, ["1"])
    assert found.throughput is None and found.accepted.source == "nothing was answered" and found.failed == 1


def test_a_speed_up_is_of_the_same_prompts(tmp_path: Path) -> None:
    drafted, plain = whole(tmp_path / "a"), opened(tmp_path / "b")
    plain.add(PromptResult("1", 1, 4.0, (replace(REPLY, ids="others"),)))
    plain.add(PromptResult("2", 1, 8.0, (replace(REPLY, tokens=30, ids=""),)))
    sides = [figures.of_file(file, ["1", "2"]) for file in (drafted, plain)]
    assert figures.speedup(*sides) == pytest.approx((40 / 2) / (40 / 8))
    assert figures.equal(drafted, plain, ["1", "2"]) == (1, 2), "by ids, else by text"
    plain.add(PromptResult("3", 1, 9.0, (REPLY,)))
    sides = [figures.of_file(file, IDS) for file in (drafted, plain)]
    assert figures.speedup(*sides) is None


def test_both_acceptance_lengths_of_recorded_replies_by_hand(tmp_path: Path) -> None:
    """Three of them: 71 tokens in 19 cycles, 73 in 24, 71 in 64; one that drafted nothing counts in neither."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    file = opened(tmp_path)
    for name, lengths in enumerate([*(cases[index]["acceptance_lengths"] for index in (0, 3, 5)), []]):
        drafted = Drafted(len(lengths), 7 * len(lengths), sum(lengths) - len(lengths))
        file.add(PromptResult(str(name), 1, 1.0, (replace(REPLY, drafted=drafted),)))
    found = figures.of_file(file, ["0", "1", "2", "3"]).accepted
    # cards: (3.736842 + 3.041667 + 1.109375) / 3; vLLM: 215 tokens / 107 cycles
    assert found.length == pytest.approx(2.629295, abs=1e-6) and found.mean == pytest.approx(2.009346, abs=1e-6)


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.9, 9), (0.01, 1), (1, 10)])
def test_percentiles_are_by_nearest_rank(share: float, value: float) -> None:
    assert figures.percentile(list(range(10, 0, -1)), share) == value


def test_alone_the_replies_own_times_count_whatever_the_parts(tmp_path: Path) -> None:
    found = figures.of_file(whole(tmp_path), IDS, alone=True).throughput
    assert found is not None and found.whole and found.prompts == set(IDS)
    assert found.tokens_per_s == pytest.approx((10 + 30 + 10) / (3 * 1.1))
