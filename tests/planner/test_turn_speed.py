"""Seconds of a turn out of what was predicted behind a few contexts."""

from __future__ import annotations

import pytest

from dflash_local.planner.speed import ExpectedAcceptance, Prediction, Times
from dflash_local.planner.turn_speed import TurnSize, TurnSpeed, cycles_per_token

LENGTHS = ExpectedAcceptance(2.0, 4.0, "a test")


def prompt_ms(tokens: int) -> float:
    return tokens * (0.1 + 0.001 * tokens)


def predicted(contexts: tuple[int, ...], lengths: ExpectedAcceptance | None = LENGTHS) -> Prediction:
    """A step of 10 ms and a cycle of 20 ms, and 1 ms more for each 1,000 tokens of context."""
    times = tuple(Times(each, 10 + each / 1000, 20 + each / 1000, 16, prompt_ms=prompt_ms(each)) for each in contexts)
    return Prediction(times, lengths, "a test")


@pytest.mark.parametrize("prompt", [500, 1000, 3000, 30_000, 60_000])
def test_a_turn_is_its_new_prompt_and_its_reply(prompt: int) -> None:
    speed = TurnSpeed(predicted((1000, 8000, 32_000)), {})
    found = speed.seconds(TurnSize(prompt, prompt // 2, 100))
    first = (prompt_ms(prompt) - prompt_ms(prompt // 2)) / 1e3
    behind = (prompt + 50) / 1000
    assert found.first_token == pytest.approx(first)
    assert found.plain == pytest.approx(first + (10 + behind) / 10)
    assert found.slowest == pytest.approx(first + min(10 + behind, (20 + behind) / 2) / 10)
    assert found.fastest == pytest.approx(first + (20 + behind) / 40)


def test_a_prompt_takes_a_pass_at_least() -> None:
    speed = TurnSpeed(predicted((1000, 8000)), {})
    assert speed.seconds(TurnSize(2000, 2000, 0)).first_token == pytest.approx(0.012)


def test_what_is_not_predicted_is_none() -> None:
    one = Prediction((Times(1000, 10.0, None, 1),), None, "a test")
    assert TurnSpeed(one, {}).seconds(TurnSize(4000, 0, 100)) == (None, pytest.approx(1.0), None, None)
    assert TurnSpeed(predicted((1000,), None), {}).seconds(TurnSize(1000, 0, 100)).fastest is None


def test_copies_stand_for_drafts_where_they_are_worth_more() -> None:
    assert cycles_per_token(4.0, {}) == 0.25
    assert cycles_per_token(4.0, {1: 8, 16: 2}) == (8 / 4 + 2) / 40
    assert cycles_per_token(16.0, {1: 8, 16: 2}) == 1 / 16
