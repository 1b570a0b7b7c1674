"""Describe what cycles on the device report to the host: a pinned ring, written behind each cycle and read when it has
come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dflash_local.errors import EngineError
from dflash_local.kernels.accept import Progress
from dflash_local.layout.cycle import RECORD_HEADER


@dataclass(frozen=True, slots=True)
class CycleKey:
    """Hold what a cycle's launches depend on; one graph each.

    Attributes:
        rows: verified. drafts: that are made, of which ``rows`` - 1 are verified. taps: the drafters' contexts are kept
            up. noisy: sampled at a temperature. max_seq_len: no token of the cycle stands at or behind this position.
            own: the target's own layer drafts, which stands beside the proposer.
    """

    rows: int
    drafts: int
    taps: bool
    noisy: bool
    max_seq_len: int
    own: bool = False


class Launched(NamedTuple):
    """Hold what a cycle is whose record comes later; ``copied``: its drafts were given."""

    key: CycleKey
    copied: bool


@dataclass(frozen=True, slots=True)
class CycleRecord:
    """One cycle's.

    Attributes:
        experts: ``FusedTarget.distinct_experts`` behind it, [mixtures, launches]; None where that was not requested.
        count: ids emitted; 0 after the end, ``kernels.accept.NOT_FINITE`` when the logits were not finite.
        accepted: drafts that were right. rows: verified. ids: the target's choices, of which ``count`` are emitted.
        margins: of the drafts, as they were last made.
    """

    launched: Launched
    count: int
    accepted: int
    rows: int
    ids: tuple[int, ...]
    margins: tuple[float, ...]
    experts: list[list[int]] | None = None


class Margins:
    """Brings the margins of drafts to the host while the device goes on with what was launched behind them."""

    def __init__(self, margins: torch.Tensor) -> None:
        """Bind them [drafts], float32 on the device."""
        self._source = margins
        self._host = torch.empty_like(margins, device="cpu", pin_memory=margins.is_cuda)
        self._event = torch.cuda.Event() if margins.is_cuda else None

    def send(self) -> None:
        """Copy them, in the order of the stream."""
        self._host.copy_(self._source, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def receive(self, count: int) -> list[float]:
        """Wait for the copy, and return the first ones."""
        if self._event is not None:
            self._event.synchronize()
        return self._host[:count].tolist()  # type: ignore[no-any-return]


class CycleRecords:
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
        self._sent: deque[tuple[Launched, torch.cuda.Event | None, bool]] = deque()
        self.cycle = 0

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, launched: Launched, with_experts: bool = False) -> None:
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
        self._sent.append((launched, event, with_experts))

    def receive(self) -> CycleRecord:
        """Wait for the oldest cycle under way."""
        launched, event, with_experts = self._sent.popleft()
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
        return CycleRecord(launched, count, accepted, rows, tuple(ids.tolist()), told, experts)
