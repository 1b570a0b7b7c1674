"""Describe how long work on a CUDA device takes, launches left out; products with clocks that are up and weights in no
cache, and which configuration of a product takes least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch

from dflash_local.kernels.kernel_record import KernelRecord
from dflash_local.kernels.quantized_weight import CodedWeight
from dflash_local.kernels.split_kv import device_properties

LIBRARY = None  # in place of a configuration: the library's own product
REPLAYS = 5
TIMED_AGAIN = 4  # layers of a kind, at each load: milliseconds
WARM_UP_S = 1.0
L2_CACHES = 3  # as many times the card's L2 is read between two uses of a weight: replacement is not strictly by age
# A time that differs by less tells nothing: between two loads clocks and other programs do as much.
CHANGED = 1.3
LEAST_CHANGE_US = 3.0  # of one product, which a launch may vary by


Config = TypeVar("Config")
Launched = TypeVar("Launched", contravariant=True)


class TimedProduct(Protocol[Launched]):
    """One product of ``count`` layers, each with another weight."""

    @property
    def count(self) -> int: ...

    def run(self, config: Launched, layers: int) -> Callable[[], object]:
        """Make what multiplies with the first layers, one after the other."""

    def others(self, layers: int) -> Iterable[torch.Tensor]:
        """List weights on the device that the first layers' products do not read."""


class KernelTimer:
    """Times products on one device against what they took when chosen; clocks are warmed up once, where needed."""

    def __init__(self) -> None:
        self._warm = False
        self._changes: list[float] = []

    @property
    def notice(self) -> str:
        """Return a line for the user where products had become slower; else empty."""
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

    def choose(
        self,
        product: TimedProduct[Config],
        record: KernelRecord,
        name: str,
        still_right: Callable[[str], Iterable[Config]],
        configs: Callable[[], Sequence[Config]],
    ) -> Config | None:
        """Choose the fastest configuration before where it takes as long as then, else the fastest now, and keep it.

        Args:
            name: of the product in the record. still_right: finds what is spelled so, where it may be launched.
            configs: finds all that are measured; of none, None is chosen and nothing kept.
        """
        known = record.chosen(name)
        for config in still_right(known.config) if known else ():
            again = partial(self.microseconds, product, config, TIMED_AGAIN)
            if known and self.agrees(known.us, product.run(config, TIMED_AGAIN), again):
                return config
        every = configs()
        if not every:
            return None
        best = self.fastest(product, every)
        record.choose(name, spell(best), self.microseconds(product, best, TIMED_AGAIN))
        return best

    def fastest(self, product: TimedProduct[Config], configs: Sequence[Config]) -> Config:
        """Measure all configurations, at least one, with all layers."""
        self.warm_up(product.run(configs[0], product.count))
        return min(configs, key=lambda config: self.microseconds(product, config, product.count))

    def microseconds(self, product: TimedProduct[Config], config: Config, layers: int) -> float:
        """Time one of the first layers' products.

        Between two repetitions other weights are read, which is what evicts a weight in decoding too, and takes no
        memory. Where all of them are smaller than the caches, caches hold them in decoding as well.
        """
        layers = min(layers, product.count)
        work, parts = product.run(config, layers), evicting(product.others(layers))
        return 1e3 * replay_ms(work, REPLAYS, lambda: [part.amax() for part in parts]) / layers

    def agrees(self, chosen_us: float, work: Callable[[], object], measure: Callable[[], float]) -> bool:
        """Return True where a product takes about as long as when chosen; in doubt ``work`` warms the clocks first."""
        if _is_near(chosen_us, measure()):
            return True
        self.warm_up(work)
        now = measure()
        if not _is_near(chosen_us, now):
            self._changes.append(now / chosen_us)
            return False
        return True


def spell(config: object) -> str:
    """Write a configuration as a record has it."""
    return "the library's product" if config is LIBRARY else repr(config)


def _is_near(one_us: float, other_us: float) -> bool:
    low, high = sorted((one_us, other_us))
    return high <= CHANGED * low or high - low <= LEAST_CHANGE_US


def largest_tensor(weight: torch.Tensor | CodedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.codes


def evicting(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return bytes of weights that push all else out of their device's L2; fewer where there are no more."""
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
    replay, end = GraphReplay(work), time.monotonic() + seconds
    while time.monotonic() < end:
        replay.span_ms()


def replay_ms(work: Callable[[], object], replays: int, before: Callable[[], object] = lambda: None) -> float:
    """Time work recorded as a graph: the median of replays in ms; ``before``: done before each, not timed."""
    replay, spans = GraphReplay(work), []
    for _ in range(replays):
        before()
        spans.append(replay.span_ms())
    return sorted(spans)[replays // 2]


def record_graph(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Record work as a graph of the current GPU; ``pool``: of torch's allocator, shared with other graphs.

    Raises:
        torch.OutOfMemoryError: no room for what the work allocates, or for torch's own few bytes.
    """
    stream = _capture_stream(torch.cuda.current_device())
    # The first graph of a GPU allocates its generator's state, on this stream and in the same segment as this tensor.
    # Without room for that, torch 2.11 ends the process in the graph's destructor.
    with torch.cuda.stream(stream):
        room = torch.empty(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    del room
    return graph


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which a GPU's graphs are recorded. One for all of them, as libraries keep scratch for each
    stream; torch's own lies on the GPU that recorded first.
    """
    return torch.cuda.Stream(device)


class GraphReplay:
    """Work recorded as a CUDA graph, after one run that compiles it. The events that time it are part of the graph:
    between one in front of it and its first kernel lie the microseconds of a launch, which are as long as a small
    product.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        work()
        torch.cuda.synchronize()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

        def timed() -> None:
            self._begin.record()
            work()
            self._end.record()

        self._graph = record_graph(timed)

    def span_ms(self) -> float:
        """Time one replay on the device in milliseconds; the host waits for its end."""
        self._graph.replay()
        torch.cuda.synchronize()
        return float(self._begin.elapsed_time(self._end))


def span_ms(work: Callable[[], object]) -> float:
    """Time compiled work on the device in milliseconds; the host waits for its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
