"""The way from one GPU to another and back, for launches and for the tensors that they work on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Link:
    """Carries tensors between a target's device and another GPU, in the order of their streams; also in a recorded
    block. By peer copies where the driver allows them, else through pinned host memory: what the driver does then by
    itself cannot be recorded.
    """

    def __init__(self, home: torch.device, away: torch.device, staged: bool | None = None) -> None:
        """Bind it. ``staged``: through host memory; None where there are no peers."""
        self.home, self.away = home, away
        self._streams = None
        if home.type == "cuda":
            # What a recorded block allocates for a moment is nobody else's: its graph writes there at every replay.
            with torch.cuda.device(away):
                self._streams = torch.cuda.Stream(), torch.cuda.MemPool()
            staged = not torch.cuda.can_device_access_peer(home, away) if staged is None else staged
        self.staged = bool(staged)
        self._pinned: dict[tuple[int, int, torch.Size], torch.Tensor] = {}

    @contextmanager
    def away_from_home(self) -> Iterator[None]:
        """Have what is launched within run on the other GPU, between what was launched at home before and behind it."""
        if self._streams is None:
            yield
            return
        (stream, pool), home = self._streams, torch.cuda.current_stream(self.home)
        stream.wait_stream(home)
        try:
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool, self.away):
                yield
        finally:  # a recording that fails ends only where its streams have joined: else torch's allocator waits for it
            home.wait_stream(stream)

    def carry(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a contiguous tensor from one of the two to the other, away from home."""
        if not self.staged:
            out.copy_(source, non_blocking=True)
            return
        key = source.data_ptr(), out.data_ptr(), source.shape
        if key not in self._pinned:
            self._pinned[key] = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self._pinned[key].copy_(source, non_blocking=True)
        if source.is_cuda:
            torch.cuda.current_stream(out.device).wait_stream(torch.cuda.current_stream(source.device))
        out.copy_(self._pinned[key], non_blocking=True)
