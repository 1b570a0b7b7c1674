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
    spans = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return float(sorted(spans)[replays // 2])
