"""The header of one safetensors file, checked entry by entry before any tensor is touched.

The format: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes without
hole or overlap (https://huggingface.co/docs/safetensors). Torch-free.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.json_file import open_plain, parse_object
from dflash_local.checkpoint_files.tensor_info import AGAIN, MAX_NAME, SAFETENSORS, TensorInfo, refuse_impostor
from dflash_local.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_ENTRIES = 300_000  # a mixture of experts that stores each expert's matrices, and their scales, one by one
MAX_RANK = 8


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the tensors of ``file``. Raise CheckpointError where it is missing, truncated, damaged or no safetensors."""
    try:
        with open_plain(file, AGAIN) as stream:
            return header_of(stream, file)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing", AGAIN) from None


def metadata_of(file: Path) -> dict[str, Any]:
    """Read what a header says beside the tensors. Raises as ``read_header`` does."""
    with open_plain(file, AGAIN) as stream:
        found = _read_json_part(stream, file)[0].get("__metadata__")
    return found if isinstance(found, dict) else {}


def header_of(stream: BinaryIO, file: Path) -> dict[str, TensorInfo]:
    """Read as ``read_header`` does, a plain file that is open at its start; ``file`` is what it is called."""
    header, start, data_bytes = _read_json_part(stream, file)
    header.pop("__metadata__", None)
    if len(header) > MAX_ENTRIES:
        raise CheckpointError(f"{file} declares {len(header)} tensors, at most {MAX_ENTRIES} are read", AGAIN)
    entries = {name: _entry(file, name, entry, start) for name, entry in header.items()}
    _check_spans(file, [(begin, end, name) for name, (_, begin, end) in entries.items()], data_bytes)
    return {name: info for name, (info, _, _) in entries.items()}


def header_bytes(file: Path) -> int:
    """Return where the data of a file begin, at most what is read of a header; nothing else of it is looked at."""
    with file.open("rb") as stream:
        return 8 + min(int.from_bytes(stream.read(8), "little"), MAX_HEADER_BYTES)


def _read_json_part(stream: BinaryIO, file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header's JSON object, where the data begin, and how many bytes of them there are."""
    try:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(32)
        # A real header may begin with the byte "<" by chance of its length: its ninth byte is "{".
        if start[8:9] != b"{" or struct.unpack("<Q", start[:8])[0] > MAX_HEADER_BYTES:
            refuse_impostor(file, start)
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are read", AGAIN)
        if length < 2 or 8 + length > size:
            raise CheckpointError(f"{file} is truncated: {size} bytes do not hold its header", AGAIN)
        stream.seek(8)
        raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", AGAIN) from error
    return parse_object(raw, f"the safetensors header of {file}", AGAIN, unique=True), 8 + length, size - 8 - length


def _entry(file: Path, name: str, entry: object, start: int) -> tuple[TensorInfo, int, int]:
    """Return one entry of the header, checked; ``start`` is where the file's data begin."""
    if len(name) > MAX_NAME:
        raise CheckpointError(f"{file}: tensor {shown(name)} has a name of {len(name)} characters", AGAIN)
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file}: tensor {shown(name)} has a damaged entry", AGAIN)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise CheckpointError(f"{file}: tensor {shown(name)} has the unknown dtype {shown(dtype)}", AGAIN)
    if not _whole_numbers(shape) or len(shape) > MAX_RANK:
        raise CheckpointError(f"{file}: tensor {shown(name)} has the impossible shape {shown(shape)}", AGAIN)
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: tensor {shown(name)} has the impossible offsets {shown(offsets)}", AGAIN)
    begin, end = offsets
    info = TensorInfo(name, dtype, tuple(shape), file, start + begin)
    if end - begin != info.nbytes or math.prod(shape) % SAFETENSORS[dtype][0]:
        raise CheckpointError(
            f"{file}: tensor {shown(name)} of shape {list(shape)} and dtype {dtype} needs {info.nbytes} bytes,"
            f" its entry spans {end - begin}",
            AGAIN,
        )
    return info, begin, end


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**62 for item in value
    )


def _check_spans(file: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Refuse tensors that do not cover the data exactly: in order, no hole, no overlap, nothing after."""
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            kind = "a hole before" if begin > expected else "an overlap at"
            raise CheckpointError(f"{file} has {kind} tensor {shown(name)} (byte {begin}, expected {expected})", AGAIN)
        expected = end
    if expected > data_bytes:
        raise CheckpointError(f"{file} is truncated: {data_bytes} bytes of data, its header needs {expected}", AGAIN)
    if expected < data_bytes:
        raise CheckpointError(f"{file} has {data_bytes - expected} bytes after its last tensor", AGAIN)
