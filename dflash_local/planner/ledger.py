"""The memory ledger: named lines of bytes and their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
RINGS = "rings"  # of snapshots; they are always in host memory


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Names an entry. ``bytes`` is None when a number it needs is not known."""

    name: str
    bytes: int | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "note": self.note}


@dataclass(frozen=True, slots=True)
class Ledger:
    """Lists what a plan needs, line by line.

    Attributes:
        lines: what torch's allocator holds at the fullest moment of a reply.
        loading: what it holds at the fullest moment of loading, None when that is unknown.
        reserve: what the device needs beside that: its context, gaps between allocations.
        host: what lies in pinned host memory instead of the device's.
        cards: what must be free on each of several GPUs; empty for one device.
    """

    lines: tuple[MemoryLine, ...]
    loading: MemoryLine
    reserve: MemoryLine = field(default_factory=lambda: MemoryLine("reserve", 0))
    host: tuple[MemoryLine, ...] = ()
    cards: tuple[int, ...] = ()

    @property
    def running(self) -> int | None:
        """Sum ``lines``; None when one is unknown."""
        known = [line.bytes for line in self.lines if line.bytes is not None]
        return sum(known) if len(known) == len(self.lines) else None

    @property
    def peak(self) -> int | None:
        """Return the most the allocator ever holds, loading included."""
        if self.running is None or self.loading.bytes is None:
            return None
        return max(self.running, self.loading.bytes)

    @property
    def total(self) -> int | None:
        """Return what must be free on the device: the peak and the reserve."""
        if self.peak is None or self.reserve.bytes is None:
            return None
        return self.peak + self.reserve.bytes

    def lacking(self, free: int, cards: tuple[int, ...] = ()) -> int | None:
        """Return the bytes that it needs beyond those that are free; 0 where it has room, None where its need is not
        known. ``cards``: free on each of several GPUs.
        """
        if self.cards:
            return sum(max(0, need - there) for need, there in zip(self.cards, cards, strict=False))
        return None if self.total is None else max(0, self.total - free)

    @property
    def moved(self) -> tuple[MemoryLine, ...]:
        """Return what lies in host memory for want of room on the device."""
        return tuple(line for line in self.host if line.name != RINGS)

    def as_dict(self) -> dict[str, Any]:
        return {
            "lines": [line.as_dict() for line in self.lines],
            "running": self.running,
            "loading": self.loading.as_dict(),
            "reserve": self.reserve.as_dict(),
            "host": [line.as_dict() for line in self.host],
            "peak": self.peak,
            "total": self.total,
            "cards": list(self.cards),
        }
