"""The page of a certificate: what it says of each verdict, and that no text of a model leaves its place."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.report.verdict_page import to_html

HOSTILE = "</q><script>document.title = 'taken'</script>{{COMMAND}}\x1b[2J\u202e"
PLACE = {
    "unit": "token",
    "index": 7,
    "ar_id": 5,
    "dflash_id": 6,
    "ar_text": " five",
    "dflash_text": HOSTILE,
    "margin": 2.5,
    "over": None,
    "unknown": "",
    "threshold": 0.5,
    "border": False,
    "prefix": HOSTILE,
    "repeated": [3, 1],
}


def page(verdict: str, sampled: dict[str, Any] | None = None, **place: Any) -> str:
    server = {"program": "llama.cpp", "version": "b1", "model": HOSTILE, "drafts": True, "method": None}
    report = {
        "verdict": verdict,
        "statement": "one of two",
        "prompts": [{}, {}],
        "max_new_tokens": 64,
        "sampling": "greedy",
        "servers": {"drafting": {**server, "gives": {"logprobs": None, "raw_prompts": False}}},
        "strength": "token by token",
        "sampled": sampled,
        "runs": [
            {"prompt": 0, "verdict": "identical", "tokens": 1200, "divergence": None},
            {"prompt": 1, "verdict": verdict, "tokens": 9, "divergence": {**PLACE, **place} if place else None},
        ],
        "promise": "this much",
    }
    return to_html(report, "a pair", "dflash certify a --prompt '<b>'").decode()


def test_the_worst_place_is_told_in_words_and_stays_text() -> None:
    found = page("wide", margin=2.5)
    assert "Not the target&#x27;s own text" in found and 'class="bad"' in found and "prompt 2, token 7" in found
    assert "prefers its own token by 2.5: more than rounding explains (up to 0.5)" in found
    assert "the plain server wrote the same 3 times, the drafting one 1 times" in found
    assert "<script" not in found and "\x1b" not in found and "\u202e" not in found
    assert found.count("dflash certify a --prompt &#x27;&lt;b&gt;&#x27;") == 1, "a hole in a text is not filled"
    assert "2 prompts, replies of 64 tokens at most, greedy" in found and "gives no raw prompts" in found


@pytest.mark.parametrize(
    ("verdict", "place", "words"),
    [
        ("near-tie", {"margin": 0.02}, "0.02: a near-tie, which rounding may turn"),
        ("wide", {"margin": None, "over": 8.0}, "over 8: more than rounding explains"),
        ("unknown", {"margin": None, "unknown": "no margins", "repeated": None}, "is not known: no margins."),
        ("BUG", {"border": True}, "at a filter&#x27;s border"),
        ("identical", {}, "There is none: 1,209 drafted tokens"),
    ],
)
def test_every_verdict_has_words(verdict: str, place: dict[str, Any], words: str) -> None:
    assert words in page(verdict, **place)


def test_sampled_replies_alone_may_be_wrong() -> None:
    assert "Sampled otherwise than asked" in page("identical", {"name": "x", "line": "sampled: x; y"})
    assert "The same text" in page("identical", {"name": "", "line": "sampled: fine"})
