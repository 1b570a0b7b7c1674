"""Launches recorded once as CUDA graphs and replayed. Knows no models."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from dflash_local.kernels.timing import record_graph


class Graphs:
    """Work recorded once and replayed; run eagerly where nothing can record it, for the reason ``fault``. A shape's
    first run is eager, since it compiles kernels; the second records.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.fault = ""
        self._on_gpu = on_gpu
        self._known: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        if not self._on_gpu or self.fault:
            return work()
        if key not in self._known:
            self._known[key] = None
            return work()
        graph = self._known[key]
        if graph is None:
            try:
                graph = self._known[key] = self._recorded(work)
            except RuntimeError as error:  # a driver or a memory that does not allow it
                self.fault = str(error).strip().partition("\n")[0]
                return work()
        graph.replay()

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return record_graph(work, self._pool)

    def forget(self, name: str) -> None:
        """Forget the graphs of the keys (name, ...)."""
        self._known = {
            key: graph for key, graph in self._known.items() if not (isinstance(key, tuple) and key[0] == name)
        }

    def clear(self) -> None:
        self._known.clear()
        self._pool = None
