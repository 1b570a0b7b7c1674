"""The header of one GGUF file: metadata and tensors, with every count checked before anything is made of it.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts, that many keys with
typed values, that many tensors with name, dims (innermost first), type and offset, then the aligned data. Torch-free.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.gguf_types import GGML_TYPES
from dflash_local.checkpoint_files.json_file import open_plain
from dflash_local.checkpoint_files.tensor_info import BLOCKS, MAX_NAME, TensorInfo
from dflash_local.checkpoint_files.weight_file import AGAIN, refuse_impostor
from dflash_local.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 100_000_000  # vocabulary and merges of the largest published models take 20 MB
MAX_STRING = 4 * 2**20  # bytes; the longest are chat templates
MAX_ITEMS = 4_000_000  # of all arrays of a file: tokens, scores, types and merges of a vocabulary
MAX_DEPTH = 4  # of arrays in arrays
MAX_RANK = 4
MAX_ALIGNMENT = 2**20  # bytes
KEY_BYTES, TENSOR_BYTES = 13, 24  # the least that one key with its value, and one tensor, take in the file

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Keys with plain values, arrays as lists; tensors under the file's own names; ``file`` for messages."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file: Path


def is_gguf(file: Path) -> bool:
    """True for a plain file that begins as GGUF does, whatever it is called."""
    try:
        with open_plain(file) as stream:
            return stream.read(4) == MAGIC
    except (FileNotFoundError, CheckpointError, OSError):
        return False


def read_gguf(file: Path) -> GgufHeader:
    """The header of ``file``. CheckpointError: missing, truncated, damaged, no GGUF, big-endian or of version 1."""
    try:
        with open_plain(file, AGAIN) as stream:
            return gguf_of(stream, file, os.fstat(stream.fileno()).st_size)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing", AGAIN) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", AGAIN) from error


def gguf_of(stream: BinaryIO, file: Path, size: int) -> GgufHeader:
    """Like ``read_gguf``, of the first bytes of a file of ``size`` bytes that is called ``file``."""
    reader = _Reader(stream, file, size)
    tensors, keys = reader.opening()
    metadata: dict[str, Any] = {}
    for _ in range(reader.count(keys, KEY_BYTES, "keys")):
        key = reader.text("a key", MAX_NAME)
        if key in metadata:
            raise CheckpointError(f"{file} holds the key {shown(key)} twice", AGAIN)
        metadata[key] = reader.value(reader.integer(4), key)
    entries: dict[str, TensorInfo] = {}
    for _ in range(reader.count(tensors, TENSOR_BYTES, "tensors")):
        info = reader.tensor()
        if info.name in entries:
            raise CheckpointError(f"{file} holds the tensor {shown(info.name)} twice", AGAIN)
        entries[info.name] = info
    alignment = _alignment(metadata.get("general.alignment", 32), file)
    start = -(-reader.position // alignment) * alignment
    placed = {info.name: _placed(info, start, alignment, size) for info in entries.values()}
    _check_overlaps(file, placed.values())
    return GgufHeader(metadata, placed, file)


class _Reader:
    """Takes value after value from a stream; nothing is read that the file or the limits cannot hold."""

    def __init__(self, stream: BinaryIO, file: Path, size: int) -> None:
        self._stream, self._file, self._size = stream, file, size
        self._items = MAX_ITEMS
        self.position = 0  # of the next byte

    def opening(self) -> tuple[int, int]:
        """How many tensors and keys the file says it holds."""
        start = self._stream.read(8)
        refuse_impostor(self._file, start)
        if start[:4] != MAGIC:
            raise CheckpointError(f"{self._file} is no GGUF file: it begins with {shown(start[:4])}", AGAIN)
        self.position = len(start)
        version = int.from_bytes(start[4:], "little")
        if len(start) == 8 and version & 0xFFFF == 0:
            raise CheckpointError(f"{self._file} is a big-endian GGUF file", "get the little-endian one")
        if len(start) == 8 and version not in VERSIONS:
            raise CheckpointError(f"{self._file} is GGUF version {version}; 2 and 3 are read", "get a newer conversion")
        return self.integer(8), self.integer(8)

    def integer(self, size: int) -> int:
        """The next unsigned number of ``size`` bytes."""
        return int.from_bytes(self._take(size), "little")

    def count(self, number: int, least: int, what: str) -> int:
        """``number`` of ``what``, each of at least ``least`` bytes, if the rest of the file can hold them."""
        if number * least > self._size - self.position:
            raise CheckpointError(f"{self._file} is truncated: it cannot hold {shown(number)} {what}", AGAIN)
        return number

    def text(self, what: str, limit: int) -> str:
        length = self.integer(8)
        if length > limit:
            raise CheckpointError(f"{self._file}: {what} of {length} bytes, at most {limit} are read", AGAIN)
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._file}: {what} is not UTF-8", AGAIN) from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """The value of a key; of an array, a list."""
        if kind == STRING:
            return self.text(f"the value of {shown(key)}", MAX_STRING)
        if kind == ARRAY and depth < MAX_DEPTH:
            return self._array(self.integer(4), self.integer(8), key, depth + 1)
        if kind not in NUMBERS:
            what = "nested too deeply" if kind == ARRAY else f"of the unknown type {kind}"
            raise CheckpointError(f"{self._file}: the value of {shown(key)} is {what}", AGAIN)
        return self._numbers(kind, 1)[0]

    def _array(self, kind: int, number: int, key: str, depth: int) -> list[Any]:
        least = struct.calcsize(NUMBERS[kind]) if kind in NUMBERS else 8
        self._items -= self.count(number, least, f"entries of {shown(key)}")
        if self._items < 0:
            raise CheckpointError(f"{self._file}: arrays of more than {MAX_ITEMS} entries in all are not read", AGAIN)
        if kind in NUMBERS:
            return self._numbers(kind, number)
        if kind == STRING:
            what = f"an entry of {shown(key)}"
            return [self.text(what, MAX_STRING) for _ in range(number)]
        return [self.value(kind, key, depth) for _ in range(number)]

    def _numbers(self, kind: int, number: int) -> list[Any]:
        code = f"<{number}{NUMBERS[kind]}"
        values = struct.unpack(code, self._take(struct.calcsize(code)))
        return list(map(bool, values)) if kind == BOOL else list(values)

    def tensor(self) -> TensorInfo:
        """The next tensor; ``offset`` is still counted from where the data begin."""
        name = self.text("a tensor's name", MAX_NAME)
        where = f"{self._file}: tensor {shown(name)}"
        rank = self.integer(4)
        dims = self._numbers(10, rank) if rank <= MAX_RANK else []
        if rank > MAX_RANK or 0 in dims:
            raise CheckpointError(f"{where} has impossible dims: {rank} of them, {dims}", AGAIN)
        kind, offset = self.integer(4), self.integer(8)
        dtype = GGML_TYPES.get(kind)
        if dtype is None:
            raise CheckpointError(f"{where} has the unknown type {kind}", "a newer version of this program may know it")
        if dims and dims[0] % BLOCKS[dtype][0] or not dims and BLOCKS[dtype][0] > 1:
            raise CheckpointError(f"{where} has rows of {dims[:1]} weights, no whole blocks of {dtype}", AGAIN)
        return TensorInfo(name, dtype, tuple(reversed(dims)), self._file, offset)

    def _take(self, number: int) -> bytes:
        self.position += number
        if self.position > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self._file} has a header of more than {MAX_HEADER_BYTES} bytes", AGAIN)
        data = self._stream.read(number) if self.position <= self._size else b""
        if len(data) < number:
            raise CheckpointError(f"{self._file} is truncated: {self._size} bytes do not hold its header", AGAIN)
        return data


def _alignment(value: object, file: Path) -> int:
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(
            f"{file}: general.alignment {shown(value)} is no power of two up to {MAX_ALIGNMENT}", AGAIN
        )
    return value


def _placed(info: TensorInfo, start: int, alignment: int, size: int) -> TensorInfo:
    """The tensor with its place in the file of ``size`` bytes, whose data begin at ``start``."""
    if info.offset % alignment:
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)} does not begin at a multiple of {alignment}", AGAIN
        )
    end = start + info.offset + info.nbytes
    if end > size:
        text = f"{info.file} is truncated: {size} bytes, tensor {shown(info.name)} ends at byte {shown(end)}"
        raise CheckpointError(text, AGAIN)
    return replace(info, offset=start + info.offset)


def _check_overlaps(file: Path, tensors: Iterable[TensorInfo]) -> None:
    """No two tensors share a byte. Between them there may be padding."""
    end = 0
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise CheckpointError(f"{file} has an overlap at tensor {shown(info.name)} (byte {info.offset})", AGAIN)
        end = info.offset + info.nbytes
