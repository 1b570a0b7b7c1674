"""The choice between two drafters and the plain step, on simulated text."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import exp, inf

import pytest

from dflash_local.engine.drafter_choice import LONGEST_WAIT, STREAK, Chosen, DrafterChoice
from dflash_local.engine.fused_runner import AHEAD
from dflash_local.engine.runner import Cycle
from dflash_local.engine.verify_length import VerifyLength

# A drafter that makes all drafts at once, and one that pays for each; as of a dense target and of a mixture.
DENSE = {1: 6.36, 2: 6.9, 3: 7.07, 4: 7.23, 6: 7.57, 8: 7.9}, {1: 6.36, 2: 7.05, 3: 7.67, 4: 8.28, 5: 8.9}
MIXTURE = (
    {1: 1.85, 2: 2.05, 3: 2.32, 4: 2.58, 6: 3.12, 8: 3.65, 12: 4.53, 16: 5.41},
    {1: 1.85, 2: 1.87, 3: 2.26, 4: 2.64, 5: 3.03},
)
LONG_BLOCKS = (
    {1: 6.38, 2: 7.47, 3: 7.55, 4: 7.59, 6: 7.7, 8: 7.79, 12: 8.52, 16: 8.79},
    {1: 6.38, 2: 6.98, 3: 7.49, 4: 7.96, 5: 8.49},
)
# Mean log odds of both drafters' drafts.
TEXTS = {"prose": (0.3, 1.6), "code": (2.6, 1.9), "hard": (-2.0, -1.8), "the first alone": (1.5, -2.0)}
CYCLES = 2000


class Text:
    """Decoding with these drafters, whose cycles are known ``AHEAD`` launches later."""

    def __init__(self, costs: Sequence[Mapping[int, float]], seed: int) -> None:
        waits = (0.1, inf)  # a chain is as long as it is verified
        self._costs, self._draw = costs, random.Random(seed)
        lengths = [VerifyLength(each, max(each), wait_ms=wait) for each, wait in zip(costs, waits, strict=False)]
        self.choice, self._on_their_way = DrafterChoice(lengths), deque[tuple[Chosen, Cycle]]()
        self.tokens, self.ms = 0, 0.0

    def run(self, means: Sequence[float], cycles: int) -> tuple[float, list[int | None]]:
        """Tokens a millisecond, and the drafter of each cycle; None is the plain step."""
        tokens, ms, drafters = 0, 0.0, list[int | None]()
        for _ in range(cycles):
            chosen = self.choice.next()
            drafts = max(self._costs[chosen.drafter]) - 1
            odds = [means[chosen.drafter] + self._draw.gauss(0, 1.2) - 0.05 * slot for slot in range(drafts)]
            told = tuple(each + self._draw.gauss(0, 0.8) for each in odds)
            rows = chosen.rows if chosen.cut is None else chosen.cut(told)
            hits = [self._draw.random() < 1 / (1 + exp(-each)) for each in odds[: rows - 1]]
            right = hits.index(False) if False in hits else len(hits)
            cycle = Cycle((0,) * (right + 1), rows - 1, right, rows, 0, 0, confidences=told if rows > 1 else ())
            self._on_their_way.append((chosen, cycle))
            if len(self._on_their_way) > AHEAD:
                self.choice.add(*self._on_their_way.popleft())
            tokens, ms = tokens + right + 1, ms + self._costs[chosen.drafter][rows]
            drafters.append(chosen.drafter if rows > 1 else None)
        self.tokens, self.ms = self.tokens + tokens, self.ms + ms
        return tokens / ms, drafters


@pytest.mark.parametrize("costs", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("name", TEXTS)
def test_it_loses_little_against_the_better_drafter_alone(costs: Sequence[Mapping[int, float]], name: str) -> None:
    """Of the drafters alone each chooses its lengths, and the plain step, as well."""
    found = []
    for seed in range(3):
        both, drafters = Text(costs, seed).run(TEXTS[name], CYCLES)
        alone = [Text([costs[at]], seed).run([TEXTS[name][at]], CYCLES)[0] for at in (0, 1)]
        found.append(both / max(alone))
        assert both > 0.94 * max(alone), (found, Counter(drafters))
    assert sum(found) > 0.97 * len(found), found


@pytest.mark.parametrize(("alike", "least"), [(False, 0.925), (True, 0.95)], ids=["of their own", "alike"])
def test_a_drafter_that_was_left_in_a_hard_passage_comes_back(alike: bool, least: float) -> None:
    """Passages of 15 cycles are easy or hard for either drafter, or for both; on average one is better by far."""
    found = []
    for seed in range(12):
        draw = random.Random(seed)
        passages = [(mean := draw.gauss(1.8, 2.0), mean + 0.3 if alike else draw.gauss(2.1, 2.0)) for _ in range(33)]

        def rate(*drafters: int, seed: int = seed, passages: Sequence[tuple[float, float]] = passages) -> float:
            text = Text([LONG_BLOCKS[at] for at in drafters], seed)
            for means in passages:
                text.run([means[at] for at in drafters], 15)
            return text.tokens / text.ms

        found.append(rate(0, 1) / max(rate(0), rate(1)))
    assert sum(found) > least * len(found), found


def test_it_follows_the_text_and_what_does_not_pay_is_seldom_tried() -> None:
    text = Text(MIXTURE, 1)
    for name, drafter in (("prose", 1), ("the first alone", 0), ("prose", 1)):
        text.run(TEXTS[name], LONGEST_WAIT + 100)
        counts = Counter(text.run(TEXTS[name], CYCLES)[1])
        assert counts[drafter] >= CYCLES - (CYCLES // 64 + STREAK), (name, counts)


def test_a_choice_that_is_begun_again_starts_with_what_promises_more() -> None:
    text = Text(MIXTURE, 1)
    text.run(TEXTS["prose"], 1000)
    again = DrafterChoice([VerifyLength(each, max(each)) for each in MIXTURE])
    assert again.control is again.controls[0]
    for each, known in zip(again.controls, text.choice.controls, strict=True):
        each.recall(known.learnt)
    again.start()
    assert again.control is again.controls[1] and again.next().drafter == 1
