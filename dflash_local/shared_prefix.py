"""How far two sequences are the same. Conversations are compared turn by turn, and are long."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Count the first elements that are the same. Of the same type, for whole slices are compared."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
