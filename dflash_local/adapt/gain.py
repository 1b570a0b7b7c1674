"""What a drafter gained by learning: held-out tokens a cycle before and after, and how sure their ratio is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

RISE, FALL = 1.03, 0.98  # the ratio: of all prompts at least, and of each kind
SURE = 2.0  # standard errors by which a kind falls further than that


class HeldOut(NamedTuple):
    """A prompt that nothing was learnt from: its kind, and tokens and number of all cycles of its replies."""

    kind: str
    tokens: int
    cycles: int


class Gain(NamedTuple):
    """Tokens a cycle ``before`` and ``after``, the ``ratio`` and its standard ``error``; None of one prompt alone."""

    before: float
    after: float
    ratio: float
    error: float | None


def gain(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> Gain:
    """Compare the same prompts, which have a cycle on either side.

    What a prompt adds to both sides tells nothing, so prompts are paired: the error is that of the logarithm of a
    ratio of ratio estimators, to first order (Cochran, Sampling Techniques, section 6.4).
    """
    sums = [(sum(each.tokens for each in side), sum(each.cycles for each in side)) for side in (before, after)]
    shares = [
        [each.tokens / tokens - each.cycles / cycles for each in side]
        for side, (tokens, cycles) in zip((before, after), sums)
    ]
    first, then = (tokens / cycles for tokens, cycles in sums)
    ratio, count = then / first, len(before)
    squares = sum((new - old) ** 2 for old, new in zip(*shares, strict=True))
    return Gain(first, then, ratio, ratio * math.sqrt(squares * count / (count - 1)) if count > 1 else None)


def gains(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> dict[str, Gain]:
    """Compare kind by kind; those without a cycle are left out."""
    found = dict[str, Gain]()
    for kind in sorted({each.kind for each in before}):
        sides = [[each for each in side if each.kind == kind] for side in (before, after)]
        if all(any(each.cycles for each in side) for side in sides):
            found[kind] = gain(*sides)
    return found


def refusal(total: Gain, kinds: dict[str, Gain]) -> str:
    """Return why what was learnt is not kept; empty where it is."""
    if total.ratio < RISE:
        return f"held-out acceptance is {total.ratio:.2f} times what it was; at least {RISE} is kept"
    for kind, (_, _, ratio, error) in kinds.items():
        if error is not None and ratio + SURE * error < FALL:
            return f"held-out acceptance of {kind} falls to {ratio:.2f} times what it was"
    return ""
