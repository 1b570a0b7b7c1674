"""Both definitions of acceptance by hand on recorded traces, rates and percentiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.bench.tasks import figures
from dflash_local.bench.tasks.results import PromptResult, Reply, Turn

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3-v1-b8" / "expected.json"
PLAIN = Reply(11, "stop", (), 0.1, 0.1, 1.0, 10.0, 10.0, "4")
DRAFTED = Reply(11, "stop", (4, 2), 0.2, 0.2, 0.25, 40.0, 24.4, "4")


def test_both_acceptance_lengths_by_hand() -> None:
    """Three recorded replies: 71 tokens in 19 cycles, 73 in 24, 71 in 64."""
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    replies = [cases[index]["acceptance_lengths"] for index in (0, 3, 5)]
    assert [(sum(reply), len(reply)) for reply in replies] == [(71, 19), (73, 24), (71, 64)]
    # cards: (3.736842 + 3.041667 + 1.109375) / 3; vLLM: 215 tokens / 107 cycles
    assert figures.acceptance_length(replies) == pytest.approx(2.629295, abs=1e-6)
    assert figures.mean_acceptance_length(replies) == pytest.approx(2.009346, abs=1e-6)


def test_a_reply_without_a_drafting_cycle_counts_in_neither() -> None:
    assert figures.acceptance_length([[3], []]) == figures.mean_acceptance_length([[3], []]) == 3
    assert figures.acceptance_length([[]]) is None and figures.mean_acceptance_length([]) is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.9, 9), (0.01, 1), (1, 10)])
def test_percentiles_are_by_nearest_rank(share: float, value: float) -> None:
    assert figures.percentile(list(range(10, 0, -1)), share) == value


def test_figures_of_a_task() -> None:
    late = replace(DRAFTED, ttft_s=0.6)
    results = [
        PromptResult("1", (Turn(5, True, PLAIN, DRAFTED),)),
        PromptResult("2", (Turn(5, False, PLAIN, late),)),
        PromptResult("3", error="ContextError: too long"),
    ]
    found = figures.of_results(results)
    assert (found.prompts, found.failed, found.replies, found.cycles, found.equal) == (2, 1, 2, 4, 1)
    assert found.ar.tokens_per_s == pytest.approx(20 / 2) and found.dflash.tokens_per_s == pytest.approx(20 / 0.5)
    assert found.ar.end_to_end_tokens_per_s == pytest.approx(22 / 2.2)
    assert found.speedup == pytest.approx((22 / 0.9) / (22 / 2.2)) and found.decode_speedup == pytest.approx(4)
    assert found.dflash.ttft_s == figures.Percentiles(0.2, 0.6, 0.6)


def test_nothing_answered_has_no_figures() -> None:
    found = figures.of_results([PromptResult("1", error="no")])
    assert found.speedup is None and found.ar.tokens_per_s is None and found.dflash.ttft_s.p50 is None
