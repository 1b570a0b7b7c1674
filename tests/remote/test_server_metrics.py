"""Counters of a server's /metrics page, and what one request did by their difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local.remote.server_metrics import Counters, ServerAcceptance, Unattributable, difference, of_reply, parse
from tests.remote.openai_fake import Fake

BEFORE = Counters(10, 70, 40, (9, 8, 7, 6, 5, 4, 1), 0, 0, 3)
AFTER = Counters(13, 91, 44, (12, 9, 7, 6, 5, 4, 1), 0, 0, 4)


def test_a_page_is_summed_over_engines_and_says_what_it_lacks() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="a b, c"} 1.0\n'
        'vllm:num_requests_running{engine="1"} 2.0 1790000000\n'
        "vllm:num_requests_waiting 0\n"
        'vllm:spec_decode_num_drafts{engine="0"} 5\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1",engine="0"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 3e0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9\n'
    )
    assert parse(text) == Counters(drafts=5, per_position=(9, 5), running=3, waiting=0)
    fake = Fake()
    fake.count()
    assert parse(fake.page()) == Counters(3, 21, 4, (3, 1, 0, 0, 0, 0, 0), 0, 0, 1)
    assert parse(Fake(program="sglang").page()) == Counters(running=0, waiting=0, ended=0, recent=3.25)


@pytest.mark.parametrize(
    "line",
    [
        "vllm:spec_decode_num_drafts_total NaN",
        "vllm:spec_decode_num_drafts_total -1",
        "vllm:spec_decode_num_drafts_total +Inf",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_drafts_total{ 1",
        "vllm:spec_decode_num_drafts_created 1.79e9",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="99999"} 1',
        "# vllm:spec_decode_num_drafts_total 1",
        "\x00\ud800{}",
    ],
)
def test_what_is_no_sample_counts_nothing(line: str) -> None:
    found = parse(line)
    assert found.drafts is None and found.per_position == ()


def test_the_difference_is_what_one_request_did() -> None:
    """1 + 4 accepted of 3 cycles, as vLLM's own documentation defines its mean acceptance length."""
    found = difference(BEFORE, AFTER)
    assert found == ServerAcceptance(3, 21, 4, (), (1.0, 1 / 3, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert found.mean == pytest.approx(7 / 3) and found.block == 8


def test_a_request_without_a_cycle_has_no_mean() -> None:
    found = difference(BEFORE, replace(BEFORE, ended=4))
    assert found.mean is None and found.block is None and found.per_position == ()


def test_shares_of_slots_need_cycles_that_drafted_all_of_them() -> None:
    found = difference(BEFORE, replace(AFTER, draft_tokens=90))
    assert found.mean == pytest.approx(7 / 3) and found.per_position == () and found.block is None


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (None, AFTER, "cannot be read"),
        (BEFORE, None, "cannot be read"),
        (replace(BEFORE, drafts=None), AFTER, "count no drafts"),
        (BEFORE, replace(AFTER, accepted=None), "count no drafts"),
        (BEFORE, replace(AFTER, drafts=None, recent=2.5), "its own mean of lately is 2.50"),
        (BEFORE, replace(AFTER, ended=None), "do not count requests"),
        (replace(BEFORE, running=None), AFTER, "do not count requests"),
        (BEFORE, replace(AFTER, ended=5), "other requests ran"),
        (BEFORE, replace(AFTER, ended=3), "other requests ran"),
        (BEFORE, replace(AFTER, running=1), "other requests ran"),
        (BEFORE, replace(AFTER, waiting=None), "other requests ran"),
        (replace(BEFORE, waiting=1), AFTER, "other requests ran"),
        (BEFORE, replace(AFTER, ended=1), "restarted"),
        (BEFORE, replace(AFTER, accepted=39), "restarted"),
        (BEFORE, replace(AFTER, accepted=99), "contradict"),
    ],
)
def test_what_cannot_be_attributed_is_absent_with_its_reason(
    before: Counters | None, after: Counters | None, why: str
) -> None:
    with pytest.raises(Unattributable, match=why):
        difference(before, after)


def test_figures_of_a_reply_as_vllms_page_shows_them() -> None:
    """The example of its documentation: 43 steps, 129 drafts, 10 accepted, mean 1.2326."""
    figures = {"num_spec_steps": 43, "num_accepted_draft_tokens": 10, "num_draft_tokens": 129}
    found = of_reply({"metrics": {"speculative_decoding": {**figures, "acceptance_histogram": [39, 1, 0, 3]}}})
    assert found is not None and found.mean == pytest.approx(1.2325581395348837) and found.block == 4
    assert found.per_position == pytest.approx((4 / 43, 3 / 43, 3 / 43))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"metrics": None},
        {"metrics": {"speculative_decoding": None}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": 3}}},
        {"metrics": {"speculative_decoding": dict.fromkeys(("num_spec_steps", "num_draft_tokens"), -1)}},
        {"sglext": {"spec_tokens_details": [{}, {}]}},
        {"sglext": {"spec_tokens_details": {"spec_verify_ct": True}}},
        {
            "sglext": {
                "spec_tokens_details": {
                    "spec_verify_ct": 3,
                    "spec_num_proposed_drafts": 4,
                    "spec_num_correct_drafts": 5,
                }
            }
        },
    ],
)
def test_a_reply_that_reports_nothing_of_use_has_no_figures(content: dict[str, object]) -> None:
    assert of_reply(content) is None
