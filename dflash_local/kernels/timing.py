"""How long work on a CUDA device takes, launches left out; products with clocks that are up and weights in no cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from dflash_local.kernels.quantized_weight import CodedWeight
from dflash_local.kernels.split_kv import device_properties

REPLAYS = 5
TIMED_AGAIN = 4  # layers of a kind, at each load: milliseconds
WARM_UP_S = 1.0
L2_CACHES = 3  # as many times the card's L2 is read between two uses of a weight: replacement is not strictly by age
# A time that differs by less tells nothing: between two loads clocks and other programs do as much.
CHANGED = 1.3
LEAST_CHANGE_US = 3.0  # of one product, which a launch may vary by


class KernelTimer:
    """Times products on one device against what they took when chosen; clocks are warmed up once, where needed."""

    def __init__(self) -> None:
        self._warm = False
        self._changes: list[float] = []

    @property
    def notice(self) -> str:
        """A line for the user where products had become slower; else empty."""
        slower = [change for change in self._changes if change > 1]
        if not slower:
            return ""
        low, high = f"{min(slower):.2g}", f"{max(slower):.2g}"
        return (
            f"the products of {len(slower)} kinds of weights take {low if low == high else f'{low} to {high}'} "
            "times as long as when their kernels were chosen (clocks, power limit, driver, another program): "
            "measured again"
        )

    def warm_up(self, work: Callable[[], object]) -> None:
        """Have the device do this work until its clocks are up."""
        if not self._warm:
            repeat(work, WARM_UP_S)
        self._warm = True

    def microseconds(self, work: Callable[[], object], products: int, others: Iterable[torch.Tensor]) -> float:
        """Of one of so many products that the work does one after the other, each with another weight.

        Between two repetitions other weights are read, which is what evicts a weight in decoding too, and takes no
        memory. Where all of them are smaller than the caches, caches hold them in decoding as well.

        Args:
            others: weights on the device that the work does not read.
        """
        parts = evicting(others)
        return 1e3 * replay_ms(work, REPLAYS, lambda: [part.amax() for part in parts]) / products

    def agrees(self, chosen_us: float, work: Callable[[], object], measure: Callable[[], float]) -> bool:
        """True where a product takes about as long as when chosen; in doubt ``work`` warms the clocks first."""
        if _is_near(chosen_us, measure()):
            return True
        self.warm_up(work)
        now = measure()
        if not _is_near(chosen_us, now):
            self._changes.append(now / chosen_us)
            return False
        return True


def _is_near(one_us: float, other_us: float) -> bool:
    low, high = sorted((one_us, other_us))
    return high <= CHANGED * low or high - low <= LEAST_CHANGE_US


def largest_tensor(weight: torch.Tensor | CodedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.codes


def evicting(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of weights, as many as push everything else out of their device's L2; fewer where there are no more."""
    parts: list[torch.Tensor] = []
    for weight in weights:
        missing = L2_CACHES * device_properties(weight.device).l2_cache_size - sum(part.nbytes for part in parts)
        if missing <= 0:
            break
        if weight.is_contiguous():
            parts.append(weight.view(-1).view(torch.uint8)[:missing])
    return parts


def repeat(work: Callable[[], object], seconds: float) -> None:
    """Have the device do nothing but this work for so long."""
    replay, end = Replay(work), time.monotonic() + seconds
    while time.monotonic() < end:
        replay.span_ms()


def replay_ms(work: Callable[[], object], replays: int, before: Callable[[], object] = lambda: None) -> float:
    """Milliseconds of the work recorded as a graph, the median of replays; ``before``: done before each, not timed."""
    replay, spans = Replay(work), []
    for _ in range(replays):
        before()
        spans.append(replay.span_ms())
    return sorted(spans)[replays // 2]


class Replay:
    """Work recorded as a CUDA graph, after one run that compiles it. The events that time it are part of the graph:
    between one in front of it and its first kernel lie the microseconds of a launch, which are as long as a small
    product.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        work()
        torch.cuda.synchronize()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._begin.record()
            work()
            self._end.record()

    def span_ms(self) -> float:
        """Milliseconds of the device for one replay; the host waits for its end."""
        self._graph.replay()
        torch.cuda.synchronize()
        return float(self._begin.elapsed_time(self._end))


def span_ms(work: Callable[[], object]) -> float:
    """Milliseconds that the device takes for work that has been compiled; the host waits for its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
