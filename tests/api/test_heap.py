"""The heap is trimmed once, a while after requests ended, and threads share arenas."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_local.api import heap


def test_requests_that_end_together_are_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(heap, "trim", lambda: trims.append(None))
    monkeypatch.setattr(heap, "SETTLE_S", 0.01)

    async def run(requests: int) -> int:
        trims.clear()
        trimmer = heap.Trimmer()
        for _ in range(requests):
            trimmer.ended()
        while trimmer._due is not None:
            await asyncio.sleep(0.005)
        await asyncio.get_running_loop().run_in_executor(None, int)  # after what was handed over before
        return len(trims)

    async def all_runs() -> list[int]:
        asyncio.get_running_loop().set_default_executor(_one_thread())
        return [await run(requests) for requests in (0, 1, 3)]

    assert asyncio.run(all_runs()) == [0, 1, 1]


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def test_trimming_is_harmless_anywhere() -> None:
    assert heap.trim() is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_the_arenas() -> None:
    script = """
import ctypes, threading
from dflash_local.api import heap
if BOUND: heap.bound_arenas()
libc = ctypes.CDLL(None)
barrier = threading.Barrier(6)
def work():
    held = ctypes.c_void_p(libc.malloc(1000))
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
for t in threads: t.start()
for t in threads: t.join()
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, libc.fdopen(1, b"w"))
libc.fflush(None)
"""
    arenas = [
        subprocess.run(
            [sys.executable, "-c", script.replace("BOUND", bound)], capture_output=True, text=True, check=True
        ).stdout.count("<heap nr=")
        for bound in ("False", "True")
    ]
    assert arenas[1] == heap.ARENAS < arenas[0]
