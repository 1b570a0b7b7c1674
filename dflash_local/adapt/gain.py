"""What a drafter gained by learning: held-out tokens a cycle before and after, and how sure their ratio is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

RISE, FALL = 1.03, 0.98  # the ratio: of all conversations at least, and of each kind
SURE = 2.0  # standard errors by which all rise above one, and a kind falls further than that


class HeldOut(NamedTuple):
    """A conversation that nothing was learnt from: its kind, and tokens and number of all cycles of its replies."""

    kind: str
    tokens: int
    cycles: int


class Gain(NamedTuple):
    """Tokens a cycle ``before`` and ``after``, the ``ratio`` and its standard ``error``; None where too few
    conversations are alike to tell.
    """

    before: float
    after: float
    ratio: float
    error: float | None


def gain(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> Gain:
    """Compare the same conversations, which have a cycle on either side.

    What a conversation adds to both sides tells nothing, so they are paired: the error is that of the logarithm of a
    ratio of ratio estimators, to first order (Cochran, Sampling Techniques, section 6.4).
    """
    changes = _changes(before, after)
    return _gain(before, after, sum(each**2 for each in changes) / (len(changes) - 1) if len(changes) > 1 else None)


def gains(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> dict[str, Gain]:
    """Compare kind by kind; those without a cycle are left out. The spread of a kind's two or three conversations
    would tell nothing, so those of all kinds have one variance.
    """
    kinds = dict[str, tuple[list[HeldOut], list[HeldOut]]]()
    for kind in sorted({each.kind for each in before}):
        sides = [each for each in before if each.kind == kind], [each for each in after if each.kind == kind]
        if all(any(each.cycles for each in side) for side in sides):
            kinds[kind] = sides
    changes = [_changes(*sides) for sides in kinds.values()]
    free = sum(len(each) - 1 for each in changes)
    variance = sum(change**2 for each in changes for change in each) / free if free else None
    return {kind: _gain(*sides, variance) for kind, sides in kinds.items()}


def _gain(before: Sequence[HeldOut], after: Sequence[HeldOut], variance: float | None) -> Gain:
    """``variance``: of a conversation's change."""
    (tokens, cycles), (tokens_after, cycles_after) = _sums(before), _sums(after)
    first, then = tokens / cycles, tokens_after / cycles_after
    error = None if variance is None else then / first * math.sqrt(len(before) * variance) / cycles
    return Gain(first, then, then / first, error)


def _changes(before: Sequence[HeldOut], after: Sequence[HeldOut]) -> list[float]:
    """How many cycles more, of those before, each conversation would have to bring to change as all together do."""
    (tokens, cycles), (tokens_after, cycles_after) = _sums(before), _sums(after)
    return [
        cycles * (new.tokens / tokens_after - new.cycles / cycles_after - old.tokens / tokens + old.cycles / cycles)
        for old, new in zip(before, after, strict=True)
    ]


def _sums(conversations: Sequence[HeldOut]) -> tuple[int, int]:
    return sum(each.tokens for each in conversations), sum(each.cycles for each in conversations)


def refusal(total: Gain, kinds: dict[str, Gain]) -> str:
    """Return why what was learnt is not kept; empty where it is."""
    if total.ratio < RISE:
        return f"held-out acceptance is {total.ratio:.2f} times what it was; at least {RISE} is kept"
    if total.error is None or total.ratio - SURE * total.error < 1:
        spread = "unknown" if total.error is None else f"{total.error:.2f}"
        return f"held-out acceptance is {total.ratio:.2f} times what it was, which may be chance: its error is {spread}"
    for kind, (_, _, ratio, error) in kinds.items():
        if error is not None and ratio + SURE * error < FALL:
            return f"held-out acceptance of {kind} falls to {ratio:.2f} times what it was"
    return ""
