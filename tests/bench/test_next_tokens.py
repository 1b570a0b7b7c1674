"""Frequencies of sampled tokens: the distribution behind the test, the cut of top-p, and what a fault is called."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from dflash_local.bench import chi_square
from dflash_local.bench.next_tokens import TOP_P, Prefix, SampledFinding, fit, judge, nucleus
from dflash_local.events import TokenLogprob
from tests.remote.scripted_server import drawn, ranked

ROOT: Prefix = (0,)


def row(*probabilities: float) -> TokenLogprob:
    top = tuple((token, "", math.log(value), None) for token, value in enumerate(probabilities))
    return TokenLogprob(0, "", top[0][2], top)


@pytest.mark.parametrize(
    ("value", "degrees", "tail"),  # from printed tables
    [(3.841, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001), (124.342, 100, 0.05), (0.0, 3, 1.0)],
)
def test_the_tail_is_that_of_tables(value: float, degrees: int, tail: float) -> None:
    assert chi_square.tail(value, degrees) == pytest.approx(tail, rel=1e-3)
    assert tail == 1.0 or chi_square.threshold(tail, degrees) == pytest.approx(value, rel=1e-3)


def test_the_power_is_that_of_a_normal_test_and_of_the_level_without_an_effect() -> None:
    assert chi_square.power(10.0, 1, 0.05) == pytest.approx(0.8854, abs=1e-4)  # P(|Z + sqrt(10)| > 1.96)
    assert chi_square.power(0.0, 7, 0.01) == pytest.approx(0.01, rel=1e-6)
    assert chi_square.power(chi_square.found_effect(20, 1e-5, 0.95), 20, 1e-5) == pytest.approx(0.95, abs=1e-6)


def test_a_token_at_the_border_of_top_p_is_left_out_and_a_short_row_says_so() -> None:
    found = nucleus(row(0.6, 0.3, 0.045, 0.04, 0.015))
    assert set(found.kept) == {0, 1, 2} and found.doubtful == {3} and found.whole  # 0.945 before it, 0.985 behind
    assert sum(found.kept.values()) == pytest.approx(1.0)
    assert not nucleus(row(0.5, 0.2)).whole and set(nucleus(row(0.5, 0.2)).kept) == {0, 1}


def test_rare_tokens_make_a_cell_together_and_a_certain_one_tests_nothing() -> None:
    found = fit({ROOT: Counter({0: 60, 1: 30, 2: 6, 3: 4})}, {ROOT: row(0.6, 0.3, 0.03, 0.01)}, 0.93)
    assert [(cell.token, cell.came) for cell in found.cells] == [(0, 60), (None, 36)] and found.degrees == 1
    assert fit({ROOT: Counter({0: 100})}, {ROOT: row(1.0)}).degrees == 0
    assert fit({ROOT: Counter({0: 100})}, {}).found_loss is None


def sampled(drafted_top_p: float = TOP_P, plain_top_p: float = TOP_P, count: int = 3000) -> SampledFinding:
    """Replies of two tokens of a made-up model."""
    rows = {}
    replies: dict[bool, list[tuple[int, Prefix]]] = {True: [], False: []}
    for drafts, top_p in ((True, drafted_top_p), (False, plain_top_p)):
        chance = random.Random(f"{drafts} {top_p}")
        for _ in range(count if drafts else count // 2):
            ids: Prefix = ()
            for _ in range(2):
                known = ranked("model", ids, 0.0)
                top = tuple((token, "", value, None) for token, value in known[:20])
                rows[(0, *ids)] = TokenLogprob(0, "", 0.0, top)
                ids = (*ids, drawn(known, top_p, chance))
            replies[drafts].append((0, ids))
    return judge(replies[True], replies[False], rows)


def test_a_sound_server_fits_and_the_power_is_said() -> None:
    found = sampled()
    assert not found.wrong and "are as frequent as the plain server says" in found.line
    assert found.first.found_loss is not None and 0 < found.first.found_loss < 0.06
    assert found.line.endswith("% behind it that never came would be found in 95 of 100 runs")
    assert "; tokens of " in found.line


@pytest.mark.parametrize(
    ("top_p", "words"),
    [
        (0.9, "unlikely tokens never come: as with top-p 0.9 in place of 0.95"),
        (0.0, "the temperature is ignored"),
        (1.0, "tokens came that top-p 0.95 leaves out"),
    ],
)
def test_a_server_that_samples_otherwise_is_named(top_p: float, words: str) -> None:
    found = sampled(top_p)
    assert found.wrong and words in found.name and not found.at_plain
    both = sampled(top_p, top_p)
    assert both.at_plain and both.name.startswith("the plain server, too: ") and words in both.name
