"""The little of safetensors that tells a whole file from a part and a shard too few. Reads headers only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_local.errors import CheckpointError
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.names import shortened, why_unsafe

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 100_000_000
REPORT = "try `dflash pull --update`, or report it to the owner of the repo"


def is_weights(name: str) -> bool:
    """True for a weight file at the root of a repo; what lies deeper is another format's copy."""
    return name.endswith(".safetensors") and "/" not in name


def needed(cache: Cache, repo: str, there: Mapping[str, Entry]) -> set[str]:
    """The weight files a checkpoint is read from; the index itself when it is absent or damaged.

    Raises:
        CheckpointError: the index names a tensor twice, or a shard that is no plain file name.
    """
    if SINGLE in there:
        return {SINGLE}
    if INDEX not in there:
        return {SINGLE}  # of the two forms the one that small repos have
    with cache.open(there[INDEX]) as file:
        raw = file.read(MAX_INDEX_BYTES + 1)
    try:
        content = json.loads(raw if len(raw) <= MAX_INDEX_BYTES else b"", object_pairs_hook=_once)
    except _TwiceError as error:
        raise CheckpointError(f"{repo}: {INDEX} lists the tensor {shortened(error.name)} twice", REPORT) from error
    except (ValueError, RecursionError):
        return {INDEX}
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        return {INDEX}
    shards = set(map(str, places.values()))
    for shard in sorted(shards):
        if not is_weights(shard) or why_unsafe(shard):
            raise CheckpointError(f"{repo}: {INDEX} names {shortened(shard)}, which is no weight file", REPORT)
    return shards


def is_whole(cache: Cache, entry: Entry) -> bool:
    """False when the file is shorter or longer than its header says, or has no readable header."""
    header = _header(cache, entry)
    if header is None:
        return False
    length, tensors = header
    try:
        end = max((int(info["data_offsets"][1]) for info in tensors.values()), default=0)
    except (KeyError, TypeError, IndexError, ValueError):
        return False
    return entry.size == 8 + length + end


def check_tensors(cache: Cache, repo: str, weights: Iterable[Entry]) -> None:
    """See that no two files hold one tensor.

    Raises:
        CheckpointError: two do; names the tensor and both files.
    """
    holders: dict[str, str] = {}
    for entry in weights:
        header = _header(cache, entry)
        for name in header[1] if header else ():
            other = holders.setdefault(name, entry.name)
            if other != entry.name:
                text = f"{repo}: the tensor {shortened(name)} is in both {other} and {entry.name}"
                raise CheckpointError(text, REPORT)


def _header(cache: Cache, entry: Entry) -> tuple[int, dict[str, Any]] | None:
    """The header's length in bytes and its tensors; None when it is no header."""
    with cache.open(entry) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, entry.size - 8):
            return None
        raw = file.read(length)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return length, {name: info for name, info in content.items() if name != "__metadata__"}


class _TwiceError(ValueError):
    """A key that stands twice in one JSON object."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceError(name)
        found[name] = value
    return found
