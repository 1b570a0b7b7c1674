"""Proof that a cached file is the Hub's, byte by byte, and that small files fit together; what is wrong is removed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

from dflash_local.catalog.row import Fingerprint, fingerprint_of
from dflash_local.checkpoint_files.json_file import MAX_CONFIG_BYTES, parse_object
from dflash_local.checkpoint_files.safetensors_folder import CONFIG, INDEX
from dflash_local.errors import CheckpointError, DownloadError, PairError
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.hub import Listing, RemoteFile
from dflash_local.store.hub_errors import WEB_PAGE, NotTheFile
from dflash_local.store.manifest import ManifestFile
from dflash_local.store.weights import REPORT, needed
from dflash_local.tables import listing as enumerated

PIECE = 4 << 20
_WEB_PAGE = (b"<!doctype", b"<html", b"<?xml", b"<head")


class Proof:
    """Describes hashes a file piece by piece: sha256, which the Hub has of LFS files; of others git's is checked."""

    def __init__(self, file: RemoteFile) -> None:
        self.size = 0
        self._file, self._head = file, b""
        self._sha256 = hashlib.sha256()
        self._git = None if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def update(self, piece: bytes) -> None:
        self._head = self._head or piece[:64]
        self._sha256.update(piece)
        if self._git:
            self._git.update(piece)
        self.size += len(piece)

    def read(self, stream: BinaryIO, on_piece: Callable[[int], None]) -> None:
        """Take a stream to its end; ``on_piece`` gets the bytes so far and may raise to stop."""
        while piece := stream.read(PIECE):
            self.update(piece)
            on_piece(self.size)

    def result(self) -> str:
        """Return the file's sha256. NotTheFile: it is not what the Hub lists, and why."""
        file, git = self._file, self._git
        if self.size != file.size:
            raise NotTheFile(f"has {self.size:,} bytes instead of {file.size:,}")
        expected, found = (file.blob, git.hexdigest()) if git else (file.sha256, self._sha256.hexdigest())
        if found != expected:
            if self._head.lstrip().lower().startswith(_WEB_PAGE):
                raise NotTheFile(WEB_PAGE)
            raise NotTheFile(f"is damaged: its checksum is {found[:12]}..., the Hub lists {str(expected)[:12]}...")
        return self._sha256.hexdigest()


def prove(cache: Cache, entry: Entry, file: RemoteFile, on_piece: Callable[[int], None]) -> ManifestFile:
    """Hash a cached file and return its record; ``on_piece`` as of ``Proof.read``.

    Raises:
        NotTheFile: it is not what the Hub lists, and why.
    """
    if entry.size != file.size:
        raise NotTheFile(f"has {entry.size:,} bytes instead of {file.size:,}")
    proof = Proof(file)
    with cache.open(entry) as stream:
        proof.read(stream, on_piece)
    return ManifestFile(file.path, file.size, proof.result(), entry.blob.name, entry.mtime_ns)


def discard(cache: Cache, repo: str, commit: str, name: str) -> None:
    """Remove a file that was proven wrong, with its blob: other programs would take it for good."""
    entry = cache.entry(repo, commit, name)
    if entry:
        entry.path.unlink(missing_ok=True)
        entry.blob.unlink(missing_ok=True)


def check_index(cache: Cache, listing: Listing) -> frozenset[str]:
    """Return the weight files the index names. DownloadError: one is not listed. CheckpointError: it is damaged."""
    entries = {entry.name: entry for entry in cache.entries(listing.repo, listing.commit)}
    weights = needed(cache, listing.repo, {name: entry for name, entry in entries.items() if name == INDEX})
    listed = {file.path for file in listing.files}
    if INDEX not in listed or INDEX not in entries:
        return frozenset(weights)
    if INDEX in weights:
        raise CheckpointError(f"{listing.repo}: {INDEX} is damaged at the source", REPORT)
    absent = sorted(weights - listed)
    if absent:
        raise DownloadError(f"{listing.repo} lacks {enumerated(absent)}, which its index asks for", REPORT)
    return frozenset(weights)


def check_generation(cache: Cache, drafter: str, commit: str, known: Sequence[Fingerprint], target: str) -> None:
    """See that a drafter is a generation known for its target. PairError names both and the fields that differ."""
    entry = cache.entry(drafter, commit, CONFIG)
    if entry is None:
        raise DownloadError(f"{drafter} has no {CONFIG}", "check the name")
    with cache.open(entry) as file:
        raw = file.read(MAX_CONFIG_BYTES + 1)
    config = parse_object(raw if len(raw) <= MAX_CONFIG_BYTES else b"", f"{drafter}: {CONFIG}", REPORT)
    found = fingerprint_of(config)
    differences = min((_differences(each, found) for each in known), key=len, default=[])
    if differences:
        hint = "it may have been retrained: update dflash-local, or accept it with --allow-mismatch"
        raise PairError(f"{drafter} is no known drafter of {target}: {'; '.join(differences)}", hint)


def _differences(known: Fingerprint, found: dict[str, object]) -> list[str]:
    fields = known.as_mapping().items()
    return [f"{name} {found.get(name)}, not {value}" for name, value in fields if value not in (None, found.get(name))]
