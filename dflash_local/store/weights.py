"""Whether a safetensors file is whole, and whether shards are missing. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dflash_local.checkpoint_files.json_file import MAX_JSON_BYTES, RepeatedKeyError, parse_object
from dflash_local.checkpoint_files.safetensors_folder import INDEX, SINGLE
from dflash_local.checkpoint_files.safetensors_header import header_of
from dflash_local.errors import CheckpointError
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.names import shortened, why_unsafe

REPORT = "try `dflash pull --update`, or report it to the owner of the repo"


def is_weights(name: str) -> bool:
    """Return True for a weight file at the root of a repo; what lies deeper is another format's copy."""
    return name.endswith(".safetensors") and "/" not in name


def needed(cache: Cache, repo: str, there: Mapping[str, Entry]) -> set[str]:
    """List the weight files a checkpoint is read from; the index itself when it is absent or damaged.

    Raises:
        CheckpointError: the index names a tensor twice, or a shard that is no plain file name.
    """
    if SINGLE in there or INDEX not in there:  # where neither is there, the form that small repos have
        return {SINGLE}
    with cache.open(there[INDEX]) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    try:
        content = parse_object(raw if len(raw) <= MAX_JSON_BYTES else b"", f"{repo}: {INDEX}", REPORT, unique=True)
    except RepeatedKeyError as error:
        raise CheckpointError(f"{repo}: {INDEX} lists the tensor {shortened(error.key)} twice", REPORT) from error
    except CheckpointError:
        return {INDEX}
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places:
        return {INDEX}
    shards = set(map(str, places.values()))
    for shard in sorted(shards):
        if not is_weights(shard) or why_unsafe(shard):
            raise CheckpointError(f"{repo}: {INDEX} names {shortened(shard)}, which is no weight file", REPORT)
    return shards


def check_files(cache: Cache, repo: str, weights: Iterable[Entry]) -> set[str]:
    """Name the files that are shorter or longer than their headers say, or have no readable one.

    Raises:
        CheckpointError: all are whole, and two hold one tensor; names it and both files.
    """
    holders, broken, twice = dict[str, str](), set[str](), ""
    for entry in weights:
        with cache.open(entry) as file:
            try:
                tensors = header_of(file, entry.path)
            except CheckpointError:  # which the loader would refuse
                broken.add(entry.name)
                continue
        for name in tensors:
            other = holders.setdefault(name, entry.name)
            if other != entry.name:
                twice = f"{repo}: the tensor {shortened(name)} is in both {other} and {entry.name}"
    if twice and not broken:
        raise CheckpointError(twice, REPORT)
    return broken
