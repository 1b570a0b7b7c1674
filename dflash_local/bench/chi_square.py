"""The chi-square distribution as far as a test needs it: its tail, where a tail begins, and the power of a test.

Tail: the incomplete gamma function by series and continued fraction (Abramowitz and Stegun 6.5.29 and 6.5.31). Power: a
non-central one is a mixture of central ones, weighed as Poisson's (26.4.25 there).
"""

from __future__ import annotations

import math

SMALL = 1e-300
CLOSE = 1e-12
STEPS = 10_000


def tail(value: float, degrees: int) -> float:
    """The probability of ``value`` or more, with so many degrees of freedom."""
    a, x = degrees / 2, value / 2
    if x <= 0:
        return 1.0
    scale = math.exp(min(0.0, a * math.log(x) - x - math.lgamma(a)))
    if x < a + 1:
        term = total = 1 / a
        for step in range(1, STEPS):
            term *= x / (a + step)
            total += term
            if term < total * CLOSE:
                break
        return max(0.0, 1 - scale * total)
    b = x + 1 - a
    c, d = 1 / SMALL, 1 / b
    found = d
    for step in range(1, STEPS):
        factor = -step * (step - a)
        b += 2
        d = 1 / _nonzero(factor * d + b)
        c = _nonzero(b + factor / c)
        found *= c * d
        if abs(c * d - 1) < CLOSE:
            break
    return min(1.0, scale * found)


def threshold(level: float, degrees: int) -> float:
    """The value that is reached with the probability ``level``."""
    low, high = 0.0, float(degrees)
    while tail(high, degrees) > level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, degrees) > level else (low, middle)
    return high


def power(effect: float, degrees: int, level: float) -> float:
    """How often a test of that level finds an effect (the parameter of non-centrality)."""
    limit, half = threshold(level, degrees), effect / 2
    spread = 10 * math.sqrt(half) + 20
    found = 0.0
    for step in range(max(0, int(half - spread)), int(half + spread) + 1):
        weight = math.exp(step * math.log(half) - half - math.lgamma(step + 1)) if half else float(step == 0)
        found += weight * tail(limit, degrees + 2 * step)
    return found


def found_effect(degrees: int, level: float, share: float) -> float:
    """The smallest effect that a test of that level finds in such a share of all tries."""
    low, high = 0.0, 1.0
    while power(high, degrees, level) < share:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, degrees, level) < share else (low, middle)
    return high


def _nonzero(value: float) -> float:
    return value if abs(value) > SMALL else SMALL
