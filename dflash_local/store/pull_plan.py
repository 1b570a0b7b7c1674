"""What a pull would do: the commit of each repo, what is here already, what is to be fetched, and the disk for it.

Asks the network for listings only, and not even that where everything is here and proven.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_local.catalog.row import Fingerprint
from dflash_local.errors import CheckpointError, DoesNotFitError
from dflash_local.store import local as locals_of
from dflash_local.store import manifest as manifests_of
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub, Listing, RemoteFile
from dflash_local.store.local import Local
from dflash_local.store.manifest import ManifestFile
from dflash_local.store.names import is_commit
from dflash_local.store.selection import wanted as selected
from dflash_local.terminal import byte_size

MARGIN = 256 << 20  # bytes left free at least
MARGIN_SHARE = 0.02
MAIN = "main"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One half of a pair to be pulled.

    Attributes:
        revision: a commit or branch; None: the main branch. generations: what a drafter may look like;
            empty: anything.
    """

    role: Literal["target", "drafter"]
    repo: str
    revision: str | None = None
    generations: tuple[Fingerprint, ...] = ()


@dataclass(frozen=True, slots=True)
class RepoPlan:
    """What is to be done for one repo; sizes in bytes.

    Attributes:
        branch: the branch that ``commit`` is the newest of; empty when that was not looked up.
        files: what belongs to it; empty with ``ready``, which means that all is here and proven.
        total: bytes of all files. to_fetch: those that must come over the network. proven: records of
            files that were proven before. unproven: bytes that are here and will be hashed.
        listing: None when the network was not needed.
    """

    wanted: Wanted
    commit: str
    branch: str
    files: tuple[RemoteFile, ...]
    total: int
    to_fetch: int
    proven: tuple[ManifestFile, ...]
    unproven: int
    ready: bool
    listing: Listing | None

    @property
    def repo(self) -> str:
        return self.wanted.repo

    @property
    def gated(self) -> bool:
        """True when the owner is known to ask for agreement to a licence."""
        return self.listing is not None and self.listing.gated


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A pull that was looked at but not begun; ``free`` bytes are left on the disk of ``where``."""

    repos: tuple[RepoPlan, ...]
    total: int
    to_fetch: int
    free: int
    where: Path

    @property
    def ready(self) -> bool:
        return all(item.ready for item in self.repos)

    @property
    def need(self) -> int:
        """Bytes of disk that the pull wants, with the margin that is to be left free."""
        return self.to_fetch + max(MARGIN, int(self.to_fetch * MARGIN_SHARE)) if self.to_fetch else 0

    def check_disk(self) -> None:
        """Raises DoesNotFitError when the disk has no room for it."""
        if self.need > self.free:
            raise DoesNotFitError(
                f"not enough room in {self.where}: {byte_size(self.need)} needed, {byte_size(self.free)} free",
                "free some space, or set HF_HUB_CACHE to a folder on a larger disk",
            )


def prepare(
    wanted: Sequence[Wanted], hub: Hub, cache: Cache, manifests: Path | None, *, update: bool = False
) -> PullPlan:
    """Look at the Hub, the cache and the disk.

    The commit on record is kept unless ``update``, which looks up what the revision means today.

    Raises:
        DownloadError: a repo cannot be listed, or, offline, is not complete here.
    """
    return _summed([_planned(want, hub, cache, manifests, update) for want in wanted], cache)


def refreshed(plan: PullPlan, cache: Cache, manifests: Path | None) -> PullPlan:
    """The plan as it is now: another process may have done some of it."""
    now = [
        _whole_or_counted(item.wanted, item.listing, item.branch, cache, manifests) if item.listing else item
        for item in plan.repos
    ]
    return _summed(now, cache)


def _planned(want: Wanted, hub: Hub, cache: Cache, manifests: Path | None, update: bool) -> RepoPlan:
    recorded = None if update else manifests_of.current(manifests, want.repo)
    revision = recorded or want.revision
    if hub.offline:
        here = locals_of.find(cache, manifests, want.repo, revision)
        return _ready(want, locals_of.require(here, want.repo, "HF_HUB_OFFLINE=0 dflash pull MODEL"))
    here = None if update else _whole(cache, manifests, want.repo, revision)
    if here is not None:
        return _ready(want, here)
    listing = hub.listing(want.repo, revision)
    branch = "" if is_commit(revision) else revision or MAIN
    return _whole_or_counted(want, listing, branch, cache, manifests)


def _whole_or_counted(want: Wanted, listing: Listing, branch: str, cache: Cache, manifests: Path | None) -> RepoPlan:
    here = _whole(cache, manifests, want.repo, listing.commit)
    return _ready(want, here, branch) if here else _counted(want, listing, branch, cache, manifests)


def _whole(cache: Cache, manifests: Path | None, repo: str, revision: str | None) -> Local | None:
    """The repo as it lies here, if it is complete and proven."""
    try:
        here = locals_of.find(cache, manifests, repo, revision)
    except CheckpointError:  # a damaged index: the pull replaces it, or tells that the source is damaged
        return None
    return here if here is not None and here.complete and here.verified else None


def _ready(want: Wanted, here: Local, branch: str = "") -> RepoPlan:
    return RepoPlan(want, here.commit, branch, (), here.size, 0, (), 0, True, None)


def _counted(want: Wanted, listing: Listing, branch: str, cache: Cache, manifests: Path | None) -> RepoPlan:
    """What of the listing is wanted, proven, here or to come."""
    files = selected(listing)
    old = manifests_of.read(manifests, want.repo, listing.commit)
    records = {record.path: record for record in old.files} if old else {}
    parts = cache.parts(want.repo)
    proven, to_fetch, unproven = [], 0, 0
    for file in files:
        entry = cache.entry(want.repo, listing.commit, file.path)
        record = records.get(file.path)
        if entry and record and not record.differs(entry) and record.blob == file.etag:
            proven.append(record)
        elif (entry.size if entry else _blob_size(cache, want.repo, file)) == file.size:
            unproven += file.size
        else:
            part = parts.get(file.etag)
            to_fetch += max(0, file.size - part.size) if part else file.size
    total = sum(file.size for file in files)
    return RepoPlan(want, listing.commit, branch, files, total, to_fetch, tuple(proven), unproven, False, listing)


def _blob_size(cache: Cache, repo: str, file: RemoteFile) -> int | None:
    """The size of a blob that another commit left here: it will be linked, not fetched."""
    try:
        return (cache.repo_folder(repo) / "blobs" / file.etag).stat().st_size
    except OSError:
        return None


def _summed(repos: list[RepoPlan], cache: Cache) -> PullPlan:
    where = next(folder for folder in (cache.folder, *cache.folder.parents) if folder.exists())
    free = shutil.disk_usage(where).free
    total, to_fetch = sum(item.total for item in repos), sum(item.to_fetch for item in repos)
    return PullPlan(tuple(repos), total, to_fetch, free, cache.folder)
