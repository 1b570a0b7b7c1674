"""The heap is trimmed once, a moment after large requests ended, and not after small ones."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_local.api import heap


def test_large_requests_that_end_together_are_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(heap, "trim", lambda: trims.append(None))
    monkeypatch.setattr(heap, "SETTLE_S", 0.01)

    async def run(*sizes: int) -> int:
        trims.clear()
        trimmer = heap.Trimmer()
        for size in sizes:
            trimmer.ended(size)
        while trimmer._due is not None:
            await asyncio.sleep(0.005)
        await asyncio.get_running_loop().run_in_executor(None, int)  # after what was handed over before
        return len(trims)

    async def all_runs() -> list[int]:
        asyncio.get_running_loop().set_default_executor(_one_thread())
        return [await run(*sizes) for sizes in ((), (heap.LARGE_BYTES - 1,), (heap.LARGE_BYTES, 2**20, 10))]

    assert asyncio.run(all_runs()) == [0, 0, 1]


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def test_trimming_is_harmless_anywhere() -> None:
    assert heap.trim() is None
