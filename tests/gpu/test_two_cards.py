"""The fused engine over two GPUs: the texts of one, by either way between them, and a second card that is full."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.errors import DoesNotFitError
from dflash_local.kernels.link import Link
from dflash_local.planner import card_probe
from dflash_local.request import SamplingParams
from tests.engine_sessions import ask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
REPLIES = 20


@pytest.mark.parametrize("cards", ["balanced", "cuda:1,0"])
@pytest.mark.parametrize("staged", [False, True], ids=["peers", "through the host"])
@pytest.mark.parametrize("pair", ["demo", "demo-hybrid"])
def test_two_cards_write_what_one_does(pair: str, staged: bool, cards: str) -> None:
    two, one = (
        load(find(pair), LoadConfig(device=device, engine="fused", exact=True, context=2048))
        for device in (cards, "cuda:0")
    )
    assert isinstance(two.runner, FusedRunner) and two.runner.target.weights.front > 0
    front = two.runner.target._front
    assert front is not None
    first, second = two.runner.target.device, front._link.away
    assert (first.index, second.index) == ((0, 1) if cards == "balanced" else (1, 0))
    front._link = Link(front._link.home, front._link.away, staged)
    two.runner._graphs.clear()  # what was recorded goes the other way
    for number in range(REPLIES):
        prompt = [5 + (7 * number + 3 * at) % 80 for at in range(20 + 40 * number)]
        sampling = SamplingParams(temperature=0.9 * (number % 2), seed=number)
        assert ask(two, prompt, 60, sampling=sampling).ids == ask(one, prompt, 60, sampling=sampling, mode="ar").ids
    two.close()
    one.close()


def test_the_way_to_the_second_card_is_measured_and_kept(tmp_path: Path) -> None:
    names = [torch.cuda.get_device_name(index) for index in range(2)]
    found = card_probe.take(tmp_path, "cuda:0", names[0], "cuda:1")
    assert found is not None and found == card_probe.read(tmp_path, names[0])
    link = found.link_to(names[1])
    assert link is not None and link.host_us > 0
    assert (link.peers_us is not None) == torch.cuda.can_device_access_peer(0, 1)
    alone = card_probe.take(tmp_path, "cuda:0", names[0])
    assert alone is not None and alone.link is None


def test_a_full_second_card_is_one_line_and_frees_the_first() -> None:
    torch.cuda.set_per_process_memory_fraction(1e-4, 1)
    held = torch.cuda.memory_allocated(0)
    try:
        with pytest.raises(DoesNotFitError, match="ran out of the device's memory"):
            load(find("demo-hybrid"), LoadConfig(device="balanced", engine="fused"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)
    gc.collect()
    assert torch.cuda.memory_allocated(0) == held


# In a process of its own: nothing of it can use the GPUs afterwards.
LOSES_THE_SECOND = """
import torch
from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, load
from dflash_local.errors import DeviceLostError
from tests.engine_sessions import ask

session = load(find("demo-hybrid"), LoadConfig(device="balanced", engine="fused"))
assert ask(session, [5, 6, 7], 20).ids
torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda:1"))
try:
    ask(session, [5, 6, 7], 20)
except DeviceLostError as error:
    print(error)
"""


def test_a_lost_second_card_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", LOSES_THE_SECOND], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("the device's context is lost: CUDA error") and done.stdout.count("\n") == 1, done
