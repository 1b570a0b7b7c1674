"""Describe what cycles on the device report to the host: a pinned ring, written behind each cycle and read when it has
come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dflash_local.errors import EngineError
from dflash_local.kernels.accept import Progress
from dflash_local.layout.cycle import RECORD_HEADER

Mark = TypeVar("Mark")


@dataclass(frozen=True, slots=True)
class CycleRecord(Generic[Mark]):
    """One cycle's: ``mark`` is what it was launched with.

    Attributes:
        experts: ``FusedTarget.distinct_experts`` behind it, [mixtures, launches]; None where that was not requested.
        count: ids emitted; 0 after the end, ``kernels.accept.NOT_FINITE`` when the logits were not finite.
        accepted: drafts that were right. rows: verified. ids: the target's choices, of which ``count`` are emitted.
        margins: of the drafts, as they were last made.
    """

    mark: Mark
    count: int
    accepted: int
    rows: int
    ids: tuple[int, ...]
    margins: tuple[float, ...]
    experts: list[list[int]] | None = None


class CycleRecords(Generic[Mark]):
    """Cycles under way, oldest first. ``cycle``: cycles sent so far."""

    def __init__(self, progress: Progress, experts: torch.Tensor | None = None) -> None:
        """Allocate the ring. ``experts``: int32 that each cycle overwrites, what ``send`` may copy too."""
        self._ring = progress.record_ring
        self._on_gpu = self._ring.is_cuda
        self._host = torch.zeros(self._ring.shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self._experts = experts
        self._host_experts: torch.Tensor | None = None
        if experts is not None:
            shape = len(self._ring), *experts.shape
            self._host_experts = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self._sent: deque[tuple[Mark, torch.cuda.Event | None, bool]] = deque()
        self.cycle = 0

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, mark: Mark, with_experts: bool = False) -> None:
        """Copy the last cycle's record to the host, behind it in the stream, perhaps with its counts of experts."""
        slot = self.cycle % len(self._ring)
        self.cycle += 1
        self._host[slot].copy_(self._ring[slot], non_blocking=True)
        if with_experts and self._experts is not None and self._host_experts is not None:
            self._host_experts[slot].copy_(self._experts, non_blocking=True)
        event: torch.cuda.Event | None = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._sent.append((mark, event, with_experts))

    def receive(self) -> CycleRecord[Mark]:
        """Wait for the oldest cycle under way."""
        mark, event, with_experts = self._sent.popleft()
        if event is not None:
            event.synchronize()
        expected = self.cycle - len(self._sent) - 1
        slot = expected % len(self._ring)
        words = self._host[slot]
        cycle, count, accepted, rows = words[:RECORD_HEADER].tolist()
        ids, margins = words[RECORD_HEADER:].chunk(2)
        if cycle != expected:
            raise EngineError(f"the device reports cycle {cycle}, cycle {expected} was expected")
        counts = self._host_experts if with_experts else None
        experts = None if counts is None else counts[slot].tolist()
        told = tuple(margins.view(torch.float32)[:-1].tolist())
        return CycleRecord(mark, count, accepted, rows, tuple(ids.tolist()), told, experts)
