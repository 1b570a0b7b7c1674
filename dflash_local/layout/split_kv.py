"""Into how many splits a long cache is cut for attention of a few rows: evenly, or by position alone."""

from __future__ import annotations

MAX_SPLITS = 64  # of an even cut; more would only be more to join
MIN_SPLIT_SIZE = 16  # keys of a split in any cut
FIXED_SPLIT_SIZE = 128  # keys of the fixed cut's smallest splits
SPLITS_PER_DOUBLING = 32  # of the fixed cut, from a length to its double


def even_splits(capacity: int) -> int:
    """Splits that a cache of so many rows is cut into at most."""
    return min(-(-capacity // MIN_SPLIT_SIZE), MAX_SPLITS)


def fixed_splits(max_seq_len: int) -> int:
    """Splits of the fixed cut below a position: all of the smallest size up to the first doubling, then ever larger."""
    doublings = max((max(max_seq_len - 1, 0) // (SPLITS_PER_DOUBLING * FIXED_SPLIT_SIZE)).bit_length() - 1, 0)
    return doublings * SPLITS_PER_DOUBLING + -(-max_seq_len // (FIXED_SPLIT_SIZE << doublings))
