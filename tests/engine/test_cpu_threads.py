"""The number of threads follows what cycles take; a thread that has loaded leaves no others behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from dflash_local.engine.cpu_threads import FIRST_WAIT, LONGEST_WAIT, TRIED, CpuThreads

Seconds = Callable[[int, int], float]  # of a cycle by the threads and the rows


def play(threads: CpuThreads, cycles: int, seconds: Seconds) -> list[int]:
    """The threads of each cycle, of 1 and of 8 rows in turn."""
    used = []
    for cycle in range(cycles):
        rows = (1, 8)[cycle % 2]
        used.append(threads.count)
        threads.add(rows, seconds(threads.count, rows))
    return used


def idle(count: int, rows: int) -> float:
    return (0.03 + 0.002 * rows) / count


def busy(count: int, rows: int) -> float:
    return (0.03 + 0.002 * rows) * (4 if count > 1 else 1)


def test_idle_cores_are_used_and_trials_become_rare() -> None:
    used = play(CpuThreads(2), 600, idle)
    assert used[:FIRST_WAIT] == [2] * FIRST_WAIT and used[FIRST_WAIT] == 1
    assert 0 < used[200:].count(1) <= (400 / LONGEST_WAIT + 1) * TRIED


def test_busy_cores_are_left_and_come_back() -> None:
    threads = CpuThreads(2)
    used = play(threads, 300, busy)
    assert used[FIRST_WAIT + TRIED] == 1
    assert used[50:].count(2) <= 250 / LONGEST_WAIT + 2  # each trial ends with its first cycle
    used = play(threads, 300, idle)
    assert used[LONGEST_WAIT + TRIED + 1 :].count(2) > 200


def test_one_thread_alone_is_never_left() -> None:
    assert set(play(CpuThreads(1), 300, busy)) == {1}


def test_settling_tells_torch() -> None:
    before = torch.get_num_threads()
    try:
        CpuThreads(before + 1).settle()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


TEAM = """
import os, torch
from dflash_local.engine.cpu_threads import end_team
torch.set_num_threads(3)
matrix = torch.ones(700, 700)
def threads():
    matrix @ matrix
    return len(os.listdir("/proc/self/task"))
working = threads()
end_team()
alone = len(os.listdir("/proc/self/task"))
print(working - alone, threads() - working)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, and GNU's OpenMP")
def test_a_team_ends_and_starts_again() -> None:
    found = subprocess.run([sys.executable, "-c", TEAM], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["2", "0"]
