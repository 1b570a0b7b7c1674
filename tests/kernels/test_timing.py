"""What is read between two uses of a weight, how long clocks are warmed up, and how a median is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from dflash_local.kernels import timing
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.kernels.timing import KernelTimer, evicting

L2 = 1000


class Replayed:
    """In place of a graph: the work runs, and takes what ``spans`` says."""

    spans: Iterator[float] = itertools.repeat(1.0)

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def span_ms(self) -> float:
        self._work()
        return next(self.spans)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "device_properties", lambda device: DeviceProperties(0, 16, (9, 0), L2))
    monkeypatch.setattr(timing, "GraphReplay", Replayed)


def test_three_times_the_cache_is_read_and_no_more() -> None:
    weights = [torch.zeros(20, 50).bfloat16(), torch.zeros(5, 40).t(), torch.zeros(30, 50, dtype=torch.uint8)]
    parts = evicting(weights)
    assert [part.nbytes for part in parts] == [2000, 1000], "of columns nothing is copied to be read"
    assert [part.data_ptr() for part in parts] == [weights[0].data_ptr(), weights[2].data_ptr()]
    assert [part.nbytes for part in evicting(weights[:1])] == [2000] and evicting([]) == []


def test_weights_are_read_before_each_repetition_and_the_median_is_that_of_one_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    other = torch.zeros(3 * L2, dtype=torch.uint8)
    monkeypatch.setattr(Replayed, "spans", iter((0.5, 9.0, 0.4, 0.3, 0.6)))
    monkeypatch.setattr(torch.Tensor, "amax", lambda part: done.append(f"read {part.nbytes}"))
    product = SimpleNamespace(count=4, run=lambda *_: lambda: done.append("timed"), others=lambda layers: [other])
    assert KernelTimer().microseconds(product, None, 8) == pytest.approx(125.0)
    assert done == ["read 3000", "timed"] * timing.REPLAYS


def test_clocks_are_warmed_up_for_a_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(100.0, 0.25)
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(seconds))
    done: list[int] = []
    timer = KernelTimer()
    for _ in range(3):
        timer.warm_up(lambda: done.append(1))
    assert len(done) == 3, "the first reading of the clock is the beginning"


@pytest.mark.parametrize(
    ("times", "same", "warmed"),
    [
        ((129.0,), True, 0),
        ((140.0, 120.0), True, 1),
        ((140.0, 140.0), False, 1),
        ((70.0, 80.0), True, 1),
        ((70.0, 70.0), False, 1),
    ],
)
def test_a_time_in_doubt_is_measured_once_more_with_warm_clocks(
    times: tuple[float, ...], same: bool, warmed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated: list[float] = []
    monkeypatch.setattr(timing, "repeat", lambda work, seconds: repeated.append(seconds))
    timer, left = KernelTimer(), iter(times)
    assert timer.agrees(100.0, lambda: None, lambda: next(left)) is same
    assert len(repeated) == warmed and not list(left) and bool(timer.notice) is (not same and times[-1] > 100)
