"""One tensor as data: its name, shape and dtype, and the line of the memory breakdown that it counts in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}

Group = Literal[
    "target weights",
    "head",
    "head for drafting",
    "embedding in host memory",
    "drafter weights",
    "target KV",
    "drafter KV",
    "rotation tables",
    "recurrent state",
    "attention partials",
    "buffers",
]


HOST_GROUPS: frozenset[Group] = frozenset({"embedding in host memory"})  # pinned, and read by the device where they lie


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that stands from load to close.

    Attributes:
        name: dotted; layers that use one buffer in turn name it alike. dtype: as torch names it. group: the breakdown's
            line. zeroed: read before everything in it has been written. room: the shape of the memory in whose front
            it lies; None: its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: Group
    zeroed: bool = False
    room: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Count bytes, with its room, padding of the allocator left out."""
        return prod(self.room or self.shape) * ITEM_BYTES[self.dtype]


def distinct(buffers: Iterable[Buffer]) -> dict[str, Buffer]:
    """Return buffers by name, in order, shared ones once. Raise ValueError where two of one name differ."""
    found: dict[str, Buffer] = {}
    for buffer in buffers:
        known = found.setdefault(buffer.name, buffer)
        if known is not buffer and known != buffer:
            raise ValueError(f"{buffer} and {known} have one name")
    return found


def group_bytes(buffers: Iterable[Buffer]) -> dict[Group, int]:
    sums: dict[Group, int] = {}
    for buffer in distinct(buffers).values():
        sums[buffer.group] = sums.get(buffer.group, 0) + buffer.nbytes
    return sums
