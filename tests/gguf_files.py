"""GGUF files byte by byte, for what no library writes: lying counts, wrong types, broken strings."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

ALIGNMENT = 32


class Tensor(NamedTuple):
    """One entry as it stands in the header; ``dims`` innermost first, ``offset`` from where the data begin."""

    name: bytes
    dims: tuple[int, ...] = (4,)
    kind: int = 0
    offset: int = 0

    def packed(self) -> bytes:
        dims = struct.pack(f"<I{len(self.dims)}Q", len(self.dims), *self.dims)
        return string(self.name) + dims + struct.pack("<IQ", self.kind, self.offset)


def string(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, number: int, entries: bytes) -> bytes:
    return struct.pack("<IQ", kind, number) + entries


def gguf(
    keys: Iterable[bytes] = (),
    tensors: Iterable[Tensor] = (),
    data: bytes = bytes(64),
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = ALIGNMENT,
) -> bytes:
    """A file; ``counts`` of tensors and keys in place of the true ones."""
    keys, tensors = list(keys), list(tensors)
    counts = counts or (len(tensors), len(keys))
    header = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(keys)
    header += b"".join(tensor.packed() for tensor in tensors)
    return header + bytes(-len(header) % alignment) + data
