"""What the memory gauge reads: of this process, of another one, of GPUs, and nothing where nobody tells."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dflash_local.planner import hardware
from dflash_local.planner.occupancy import Occupancy, occupancy
from tests.planner.test_machine import MIB, SPARK, TWO, answers

AMD = '{"card0": {"VRAM Total Memory (B)": "1000", "VRAM Total Used Memory (B)": "400", "Card Series": "x"}}'


def test_on_a_cpu_it_is_this_process_of_the_machine() -> None:
    found = occupancy("cpu", {})
    assert found.whose == "this process" and found.total == hardware.memory().total
    assert found.used is not None and 5 * MIB < found.used < found.total


def test_of_a_pair_that_dflash_serve_holds_it_is_that_process() -> None:
    code = "import sys; held = b'x' * 2**26; print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        found = occupancy("cpu", {}, other.pid)
        other.communicate("")
    assert found.whose == "the engine" and found.used is not None and found.used > 64 * MIB
    assert occupancy("cpu", {}, other.pid) == Occupancy(), "it has ended"


@pytest.mark.parametrize(
    "device, hidden, used, total",
    [
        ("cuda", None, 1564, 24564),
        ("cuda:1", None, 9140, 49140),
        ("cuda:0", "1", 9140, 49140),
        ("balanced", None, 10704, 73704),
        ("cuda:1,0", None, 10704, 73704),
        ("cuda:2", None, None, None),
        ("cuda:x", None, None, None),
        ("cuda:0", "", None, None),
    ],
)
def test_on_a_gpu_it_is_what_the_driver_says(
    device: str, hidden: str | None, used: int | None, total: int | None
) -> None:
    environ = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    found = occupancy(device, environ, probe=answers(TWO))
    assert found.used == (None if used is None else used * MIB) and found.total == (total and total * MIB)


@pytest.mark.parametrize("nvidia", [None, "", SPARK, "Unable to determine the device handle\n"])
def test_what_nobody_tells_is_not_guessed(nvidia: str | None) -> None:
    assert occupancy("cuda:0", {}, probe=answers(nvidia)) == Occupancy()
    assert occupancy("mps", {}, probe=answers(nvidia)) == Occupancy() == occupancy("", {}, probe=answers(nvidia))


def test_amd_devices_are_asked_where_there_is_no_other() -> None:
    assert occupancy("cuda:0", {}, probe=answers(None, amd=AMD)) == Occupancy(400, 1000, "the GPU")
