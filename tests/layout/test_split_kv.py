"""Even splits of a cache: up to a bound. Fixed ones: ``tests/kernels/test_fp8_cache.py``."""

from __future__ import annotations

from dflash_local.layout.split_kv import MAX_SPLITS, MIN_SPLIT_SIZE, even_splits


def test_even_splits_hold_at_least_so_many_keys() -> None:
    assert [even_splits(keys) for keys in (1, MIN_SPLIT_SIZE, MIN_SPLIT_SIZE + 1, 10**6)] == [1, 1, 2, MAX_SPLITS]
