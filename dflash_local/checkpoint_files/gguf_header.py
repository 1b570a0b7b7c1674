"""The header of one GGUF file: metadata and tensors, with every count checked before anything is made of it.

Magic, version, two counts; keys with typed values; tensors with name, dims (innermost first), type and offset; aligned
data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Torch-free.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.json_file import open_plain
from dflash_local.checkpoint_files.tensor_info import AGAIN, BLOCKS, GGML_TYPES, MAX_NAME, TensorInfo, refuse_impostor
from dflash_local.errors import CheckpointError

MAGIC = b"GGUF"
OPENING = struct.Struct("<4sIQQ")  # magic, version, numbers of tensors and keys
MAX_ALIGNMENT = 2**20
MAX_HEADER_BYTES = 100_000_000  # the largest vocabularies of published models take 20 MB
MAX_STRING = 4 * 2**20  # bytes; the longest are chat templates
MAX_ITEMS = 4_000_000  # of all arrays: tokens, scores, types and merges of a vocabulary
MAX_ENTRIES = 300_000  # tensors, or keys, as of safetensors
MAX_DEPTH = MAX_RANK = 4  # of arrays in arrays; of tensors
KEY_BYTES, TENSOR_BYTES = 13, 24  # the least that a key with its value, and a tensor, take in the header
BOOL, STRING, ARRAY, UINT64 = 7, 8, 9, 10
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", UINT64: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Keys with plain values, arrays as lists; tensors under the file's own names; ``file`` for messages."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file: Path


def is_gguf(file: Path) -> bool:
    """Return True for a plain file that begins as GGUF does, whatever it is called."""
    try:
        with open_plain(file) as stream:
            return stream.read(4) == MAGIC
    except (OSError, CheckpointError):
        return False


def read_gguf(file: Path) -> GgufHeader:
    """Read the header. Raise CheckpointError where it is missing, damaged, no GGUF, big-endian or of version 1."""
    try:
        with open_plain(file, AGAIN) as stream:
            return gguf_of(stream, file, os.fstat(stream.fileno()).st_size)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing", AGAIN) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", AGAIN) from error


def gguf_of(stream: BinaryIO, file: Path, size: int) -> GgufHeader:
    """Read the header of a file of ``size`` bytes from a stream at its start, which may end where the header does."""
    reader = _Reader(stream, file, size)
    tensor_count, key_count = reader.opening()
    metadata: dict[str, Any] = {}
    for _ in range(reader.count(key_count, KEY_BYTES, "keys", MAX_ENTRIES)):
        key = reader.texts(1, "a key", MAX_NAME)[0]
        if key in metadata:
            raise reader.error(f" holds the key {shown(key)} twice")
        metadata[key] = reader.value(reader.integer(4), key)
    entries: dict[str, TensorInfo] = {}
    for _ in range(reader.count(tensor_count, TENSOR_BYTES, "tensors", MAX_ENTRIES)):
        info = reader.tensor()
        if info.name in entries:
            raise reader.error(f" holds the tensor {shown(info.name)} twice")
        entries[info.name] = info
    return GgufHeader(metadata, reader.placed(entries, metadata.get("general.alignment", 32)), file)


class _Reader:
    """Takes value after value from a stream; nothing is read that the file or the limits cannot hold."""

    def __init__(self, stream: BinaryIO, file: Path, size: int) -> None:
        self._stream, self._file, self._size = stream, file, size
        self._items, self._end = MAX_ITEMS, 0  # that may still come; of what is read

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._file}{text}", AGAIN)

    def opening(self) -> tuple[int, int]:
        """Return how many tensors and keys the file says it holds."""
        start = self._stream.read(OPENING.size)
        refuse_impostor(self._file, start)
        if start[:4] != MAGIC:
            raise self.error(f" is no GGUF file: it begins with {start[:4]!r}" if start else " is empty")
        self._reach(OPENING.size, len(start))
        _, version, tensor_count, key_count = OPENING.unpack(start)
        if version in (2 << 24, 3 << 24):
            raise CheckpointError(f"{self._file} is a big-endian GGUF file", "get the little-endian one")
        if version not in (2, 3):
            raise CheckpointError(f"{self._file} is of GGUF version {version}, 2 and 3 are read", "get a newer file")
        return tensor_count, key_count

    def _reach(self, size: int, got: int) -> None:
        """Count ``size`` bytes of which ``got`` were there; CheckpointError: fewer, or beyond the limits."""
        self._end += size
        if MAX_HEADER_BYTES < self._end <= self._size:
            raise self.error(f" has a header of more than {MAX_HEADER_BYTES} bytes")
        if got < size or self._end > self._size:
            raise self.error(f" is truncated: {self._size} bytes do not hold its header")

    def count(self, number: int, least: int, what: str, most: int) -> int:
        """Return ``number`` where the rest of the file holds as many of ``least`` bytes and ``most`` allows it."""
        if number * least > self._size - self._end:
            raise self.error(f" is truncated: it cannot hold {number} {what}")
        if number > most:
            raise self.error(f" declares {number} {what}, at most {most} are read")
        return number

    def integer(self, size: int) -> int:
        """Return the next unsigned number of ``size`` bytes."""
        raw = self._stream.read(size)
        self._reach(size, len(raw))
        return int.from_bytes(raw, "little")

    def texts(self, number: int, what: str, longest: int) -> list[str]:
        """Return the next strings, in one loop without calls of ours: a vocabulary holds 250,000."""
        read, end, texts = self._stream.read, self._end, []
        head, last = bytes(8), min(self._size, MAX_HEADER_BYTES)
        for _ in range(number):
            head = read(8)
            length = int.from_bytes(head, "little")
            end += 8 + length
            if length > longest:
                raise self.error(f": {what} of {length} bytes, at most {longest} are read")
            if end > last:
                break
            texts.append(read(length))
        self._reach(end - self._end, 8 * len(texts) + sum(map(len, texts)) if len(head) == 8 else 0)
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError:
            raise self.error(f": {what} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """Return the value of a key; of an array, a list."""
        if kind == STRING:
            return self.texts(1, f"the value of {shown(key)}", MAX_STRING)[0]
        if kind == ARRAY and depth < MAX_DEPTH:
            return self._array(self.integer(4), self.integer(8), key, depth + 1)
        if kind not in NUMBERS:
            raise self.error(f": {shown(key)} has " + ("arrays too deep" if kind == ARRAY else f"unknown type {kind}"))
        return self._numbers(kind, 1)[0]

    def _array(self, kind: int, number: int, key: str, depth: int) -> list[Any]:
        least = struct.calcsize(NUMBERS[kind]) if kind in NUMBERS else 8
        self._items -= self.count(number, least, f"entries of {shown(key)}", self._items)
        if kind in NUMBERS:
            return self._numbers(kind, number)
        if kind == STRING:
            return self.texts(number, f"an entry of {shown(key)}", MAX_STRING)
        return [self.value(kind, key, depth) for _ in range(number)]

    def _numbers(self, kind: int, number: int) -> list[Any]:
        form = struct.Struct(f"<{number}{NUMBERS[kind]}")
        raw = self._stream.read(form.size)
        self._reach(form.size, len(raw))
        return [value != 0 for value in raw] if kind == BOOL else list(form.unpack(raw))

    def tensor(self) -> TensorInfo:
        """Return the next tensor; ``offset`` is still counted from where the data begin."""
        name = self.texts(1, "a tensor's name", MAX_NAME)[0]
        rank = self.integer(4)
        dims = self._numbers(UINT64, rank) if rank <= MAX_RANK else [0]
        kind, offset = self.integer(4), self.integer(8)
        dtype = GGML_TYPES.get(kind)
        if 0 in dims:
            raise self.error(f": tensor {shown(name)} has impossible dims, {rank} of them")
        if dtype is None:
            raise self.error(f": tensor {shown(name)} has the unknown type {kind}")
        if (dims or [1])[0] % BLOCKS[dtype][0]:
            raise self.error(f": tensor {shown(name)} of dims {dims} has rows that are no whole blocks of {dtype}")
        return TensorInfo(name, dtype, tuple(reversed(dims)), self._file, offset)

    def placed(self, tensors: dict[str, TensorInfo], alignment: object) -> dict[str, TensorInfo]:
        """Return the tensors with their places in the file; each inside it, none over another, padding between them."""
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.error(f": general.alignment {shown(alignment)} is no power of two up to {MAX_ALIGNMENT}")
        start = end = -(-self._end // alignment) * alignment
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            begin = start + info.offset
            if info.offset % alignment or begin < end:
                raise self.error(f": tensor {shown(info.name)} overlaps the one before it, or is not aligned")
            end = begin + info.nbytes
            if end > self._size:
                raise self.error(f" is truncated: {self._size} bytes, {shown(info.name)} ends at byte {shown(end)}")
        return {name: replace(info, offset=start + info.offset) for name, info in tensors.items()}


MAX_PARTS = 500
NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def open_gguf(file: Path) -> GgufHeader:
    """Return the header of a model whose only file, or any part, is ``file``; metadata are those of the first part.

    Raises:
        CheckpointError: as of ``read_gguf`` for any part; and, naming the file, a part that is missing, is another one
            than its name says, belongs to another model, or holds a tensor that an earlier one has.
    """
    header = read_gguf(file)
    count = header.metadata.get(COUNT, 1)
    if count in (0, 1):
        return header
    parts = [header if part == file else read_gguf(part) for part in _names(file, count)]
    first = parts[0].metadata
    tensors = dict(parts[0].tensors)
    for number, part in enumerate(parts):
        if part.metadata.get(NUMBER) != number:
            text = f"{part.file} is part {number + 1} by its name, by its header {NUMBER} is"
            raise CheckpointError(f"{text} {shown(part.metadata.get(NUMBER))}", AGAIN)
        for key in (COUNT, TENSORS):
            if part.metadata.get(key) != first.get(key):
                raise CheckpointError(f"{part.file} is a part of another model: its {key} differs", AGAIN)
        twice = next((name for name in part.tensors if number and name in tensors), None)
        if twice is not None:
            raise CheckpointError(f"{part.file} holds the tensor {shown(twice)}, which an earlier part has", AGAIN)
        tensors |= part.tensors
    if len(tensors) != first.get(TENSORS):
        text = f"{file} and its other parts hold {len(tensors)} tensors, {TENSORS} is {shown(first.get(TENSORS))}"
        raise CheckpointError(text, AGAIN)
    return GgufHeader(first, tensors, parts[0].file)


def _names(file: Path, count: object) -> list[Path]:
    """Return the files of all ``count`` parts, which lie beside each other."""
    named = NAME.fullmatch(file.name)
    if type(count) is not int or not 1 < count <= MAX_PARTS:
        raise CheckpointError(f"{file}: {COUNT} {shown(count)} is no number up to {MAX_PARTS}", AGAIN)
    if not named or int(named["count"]) != count:
        hint = f"parts are named like NAME-00001-of-{count:05}.gguf and lie in one folder"
        raise CheckpointError(f"{file} is one of {count} parts, which its name does not say", hint)
    return [file.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
