"""Proof of single files, of an index against its listing, and of a drafter against known generations."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dflash_local.catalog.row import Fingerprint
from dflash_local.errors import CheckpointError
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.hub import Listing, RemoteFile
from dflash_local.store.verify import check_generation, check_index, prove
from tests.fake_hub import File

REPO, COMMIT = "owner/name", "1" * 40
INDEX = "model.safetensors.index.json"


def put(cache: Cache, name: str, data: bytes) -> Entry:
    """A file of the snapshot, linked to its blob as huggingface_hub does."""
    file = File.of(name, data)
    blob = cache.repo_folder(REPO) / "blobs" / file.etag
    path = cache.snapshot(REPO, COMMIT) / name
    for folder in (blob.parent, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    path.unlink(missing_ok=True)
    path.symlink_to(f"../../blobs/{file.etag}")
    entry = cache.entry(REPO, COMMIT, name)
    if entry is None:
        raise AssertionError(name)
    return entry


def remote(name: str, data: bytes) -> RemoteFile:
    file = File.of(name, data)
    return RemoteFile(name, file.size, file.sha256 if file.lfs else None, file.blob)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_proof_records_what_was_seen(cache: Cache, name: str) -> None:
    entry, seen = put(cache, name, b"12345"), list[int]()
    record = prove(cache, entry, remote(name, b"12345"), seen.append)
    assert (record.path, record.size, record.sha256) == (name, 5, hashlib.sha256(b"12345").hexdigest())
    assert record.blob == entry.blob.name == remote(name, b"12345").etag and record.mtime_ns == entry.mtime_ns
    assert seen == [5] and not record.differs(entry)


def listing(*names: str) -> Listing:
    return Listing(REPO, COMMIT, tuple(RemoteFile(name, 1, None, "0" * 40) for name in names), False)


def test_an_index_is_read_before_its_shards_are_fetched(cache: Cache) -> None:
    put(cache, INDEX, json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode())
    whole = listing(INDEX, "model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
    assert check_index(cache, whole) == {"model-1.safetensors", "model-2.safetensors"}


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"weight_map": {}}', b"[" * 5000])
def test_a_damaged_index_at_the_source(cache: Cache, raw: bytes) -> None:
    put(cache, INDEX, raw)
    with pytest.raises(CheckpointError, match="is damaged at the source"):
        check_index(cache, listing(INDEX, "model-1.safetensors"))


def test_a_single_file_needs_no_index(cache: Cache) -> None:
    assert check_index(cache, listing("config.json", "model.safetensors")) == {"model.safetensors"}


GENERATIONS = (Fingerprint("first", 5, (1, 9), 7, 16, None), Fingerprint("second", 6, (1, 9), 7, 16, 4096))


def config(**changes: object) -> bytes:
    fields = {"num_hidden_layers": 5, "target_layer_ids": [1, 9], "mask_token_id": 7, "block_size": 16}
    return json.dumps({**fields, **changes}).encode()


def test_a_known_generation_passes(cache: Cache) -> None:
    put(cache, "config.json", config())
    check_generation(cache, REPO, COMMIT, GENERATIONS, "owner/target")
    put(cache, "config.json", config(num_hidden_layers=99))
    check_generation(cache, REPO, COMMIT, (), "owner/target")


def test_a_config_that_is_no_json(cache: Cache) -> None:
    put(cache, "config.json", b"<html>")
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        check_generation(cache, REPO, COMMIT, GENERATIONS, "owner/target")
