"""How long work on a CUDA device takes, launches left out."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replay_ms(work: Callable[[], object], replays: int) -> float:
    """Milliseconds of one run of the work, which is recorded as a graph; the median of so many replays."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return float(sorted(span_ms(graph.replay) for _ in range(replays))[replays // 2])


def span_ms(work: Callable[[], object]) -> float:
    """Milliseconds that the device takes for work that has been compiled; the host waits for its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
