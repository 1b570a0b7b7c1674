"""From names to proven files: what a pull would fetch, whether it fits on the disk, and the pull itself.

The network is asked for listings only until the pull begins, and not even for them where everything is here and proven.
Small files of every repo come first, so that a wrong pair or a torn index costs no gigabytes; the manifest comes last,
so that there is none for half a repo. Knows no screens.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from dflash_local.catalog.row import Fingerprint
from dflash_local.errors import CheckpointError, DoesNotFitError, Interrupted, PairError
from dflash_local.events import Notice
from dflash_local.store import local as locals_of
from dflash_local.store import manifest as manifests_of
from dflash_local.store.atomic import write_atomic
from dflash_local.store.cache import Cache
from dflash_local.store.file_transfer import FileDownload
from dflash_local.store.hub import Hub, Listing, RemoteFile
from dflash_local.store.local import Local
from dflash_local.store.lock import exclusive
from dflash_local.store.manifest import Manifest, ManifestFile
from dflash_local.store.names import file_parts, is_commit
from dflash_local.store.selection import is_weight, refuse_unread
from dflash_local.store.selection import wanted as selected
from dflash_local.store.transfer import PullEvent, Transfer
from dflash_local.store.verify import check_generation, check_index
from dflash_local.terminal import byte_size

MARGIN = 256 << 20  # bytes left free at least
MARGIN_SHARE = 0.02
MAIN = "main"
REF_MODE = 0o644  # as every other program writes it
Parts = Mapping[str, Mapping[str, Path]]  # by repository and the blob's name


@dataclass(frozen=True, slots=True)
class Wanted:
    """Names one half of a pair to be pulled: a commit, branch or the main branch (None), what a drafter may look like,
    and
    which GGUF file is meant (None: a checkpoint of safetensors files).
    """

    role: Literal["target", "drafter"]
    repo: str
    revision: str | None = None
    generations: tuple[Fingerprint, ...] = ()
    file: str | None = None


@dataclass(frozen=True, slots=True)
class RepoPlan:
    """Says what is to be done for one repo; sizes in bytes.

    Attributes:
        branch: the branch that ``commit`` is the newest of; empty when that was not looked up.
        files: what belongs to it; empty with ``ready``, which means that all is here and proven.
        to_fetch: of ``total``, what must come over the network. proven: records of files that were proven before.
        unproven: bytes that are here and will be hashed. listing: None when the network was not needed.
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
        """Say whether the owner is known to ask for agreement to a licence."""
        return self.listing is not None and self.listing.gated


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Describes a pull that was looked at but not begun; ``free`` bytes are left on the disk of ``where``."""

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
        """Return the bytes of disk that the pull wants, with the margin that is to be left free."""
        return self.to_fetch + max(MARGIN, int(self.to_fetch * MARGIN_SHARE)) if self.to_fetch else 0

    def check_disk(self) -> None:
        """Raise DoesNotFitError when the disk has no room for it."""
        if self.need > self.free:
            lacking = f"not enough room in {self.where}: {byte_size(self.need)} needed, {byte_size(self.free)} free"
            raise DoesNotFitError(lacking, "free some space, or set HF_HUB_CACHE to a folder on a larger disk")


def prepare(
    wanted: Sequence[Wanted], hub: Hub, cache: Cache, manifests: Path | None, *, update: bool = False
) -> PullPlan:
    """Look at the Hub, the cache and the disk. DownloadError: a repo cannot be listed or, offline, is incomplete.

    The commit on record is kept unless ``update``, which looks up what the revision means today.
    """
    return _summed([_planned(want, hub, cache, manifests, update) for want in wanted], cache)


def _planned(want: Wanted, hub: Hub, cache: Cache, manifests: Path | None, update: bool) -> RepoPlan:
    if want.file is not None:
        refuse_unread(want.file)  # before anybody is asked
    recorded = None if update else manifests_of.current(manifests, want.repo)
    revision = recorded or want.revision
    if hub.offline:
        here = locals_of.find(cache, manifests, want.repo, revision, want.file)
        return _ready(want, locals_of.require(here, want.repo, "HF_HUB_OFFLINE=0 dflash pull MODEL"))
    if not update and (whole := _whole(cache, manifests, want, revision)) is not None:
        return _ready(want, whole)
    listing = hub.listing(want.repo, revision)
    return _counted(want, listing, "" if is_commit(revision) else revision or MAIN, cache, manifests)


def _whole(cache: Cache, manifests: Path | None, want: Wanted, revision: str | None) -> Local | None:
    """Find what is wanted as it lies here, if it is complete and proven."""
    with suppress(CheckpointError):  # a damaged index: the pull replaces it, or finds that the source is damaged
        here = locals_of.find(cache, manifests, want.repo, revision, want.file)
        return here if here is not None and here.complete and here.verified else None
    return None


def _ready(want: Wanted, here: Local, branch: str = "") -> RepoPlan:
    return RepoPlan(want, here.commit, branch, (), here.size, 0, (), 0, True, None)


def _counted(want: Wanted, listing: Listing, branch: str, cache: Cache, manifests: Path | None) -> RepoPlan:
    """Count what of the listing is wanted, proven, here or to come; nothing where all of it is here and proven."""
    if (whole := _whole(cache, manifests, want, listing.commit)) is not None:
        return _ready(want, whole, branch)
    files, blobs = selected(listing, want.file), cache.repo_folder(want.repo) / "blobs"
    old = manifests_of.read(manifests, want.repo, listing.commit)
    records = {record.path: record for record in old.files} if old else {}
    parts = cache.parts(want.repo)
    proven, to_fetch, unproven = [], 0, 0
    for file in files:
        entry, size = cache.entry(want.repo, listing.commit, file.path), None
        record = records.get(file.path)
        if entry and record and not record.differs(entry) and record.blob == file.etag:
            proven.append(record)
            continue
        with suppress(OSError):  # else the blob of another commit will be linked, not fetched
            size = entry.size if entry else (blobs / file.etag).stat().st_size
        if size == file.size:
            unproven += file.size
        else:
            part = parts.get(file.etag)
            to_fetch += max(0, file.size - part.size) if part else file.size
    total = sum(file.size for file in files)
    return RepoPlan(want, listing.commit, branch, files, total, to_fetch, tuple(proven), unproven, False, listing)


def _summed(repos: list[RepoPlan], cache: Cache) -> PullPlan:
    where = next(folder for folder in (cache.folder, *cache.folder.parents) if folder.exists())
    total, to_fetch = sum(item.total for item in repos), sum(item.to_fetch for item in repos)
    return PullPlan(tuple(repos), total, to_fetch, shutil.disk_usage(where).free, cache.folder)


def pull(
    plan: PullPlan,
    hub: Hub,
    cache: Cache,
    manifests: Path | None,
    locks: Path | None,
    *,
    on_event: Callable[[PullEvent], None] = lambda event: None,
    cancelled: Callable[[], bool] = lambda: False,
    allow_mismatch: bool = False,
) -> tuple[Local, ...]:
    """Make every repo of the plan present and proven, and record it.

    Waits for another process that pulls one of them. A plan that needs nothing opens no socket and writes nothing.

    Args:
        manifests, locks: where records and locks go; None keeps none.
        cancelled: polled about ten times a second; True ends the pull within two seconds.
        allow_mismatch: a drafter of an unknown generation is only warned of.

    Raises:
        Interrupted: cancelled or Ctrl-C; names what is kept. DoesNotFitError: the disk is or became full.
        DownloadError: see ``hub_errors``. PairError: not a known drafter of its target.
        CheckpointError: an index at the source is damaged.
    """

    def report_holder(repo: str, pid: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        on_event(Notice(f"{repo} is being pulled by {who}: waiting for it"))

    if plan.ready:
        _check_pair(plan, cache, on_event, allow_mismatch)
        return _found(plan, cache, manifests)
    with ExitStack() as locked:
        for repo in sorted({item.repo for item in plan.repos}):
            locked.enter_context(exclusive(locks, repo, partial(report_holder, repo), cancelled=cancelled))
        now = [  # another process may have done some of it
            _counted(item.wanted, item.listing, item.branch, cache, manifests) if item.listing else item
            for item in plan.repos
        ]
        plan = _summed(now, cache)
        if not plan.ready:
            parts = {item.repo: _parts(item, cache, on_event) for item in plan.repos if not item.ready}
            plan.check_disk()
            for item in plan.repos:
                if not item.ready:
                    _begin(item, cache, manifests)
            if known := sum(item.unproven for item in plan.repos):
                on_event(Notice(f"checking {byte_size(known)} that are here already and were never verified"))
            transfer = Transfer(hub, cache, on_event, cancelled)
            try:
                _fetch(plan, hub, cache, parts, transfer, lambda: _check_pair(plan, cache, on_event, allow_mismatch))
            except Interrupted as stop:
                files = [record for records in transfer.records.values() for record in records]
                size = byte_size(sum(record.size for record in files))
                kept = f"{len(files)} finished files ({size}) are kept" if files else "nothing was finished"
                hint = "run it again to go on where it was, also in the middle of a file"
                raise Interrupted(f"pull {stop.message}; {kept}", hint) from stop
            for item in plan.repos:
                if not item.ready:
                    _record(item, transfer.records[item.repo], hub, cache, manifests, on_event)
        return _found(plan, cache, manifests)


def _begin(item: RepoPlan, cache: Cache, manifests: Path | None) -> None:
    """Mark what is about to come, so that it is ours where this pull does not end."""
    if manifests is not None and item.commit not in cache.commits(item.repo):
        with suppress(OSError):  # a read-only home
            manifests_of.begin(manifests, item.repo, item.commit)


def _fetch(
    plan: PullPlan, hub: Hub, cache: Cache, parts: Parts, transfer: Transfer, check_pair: Callable[[], None]
) -> None:
    """Fetch the small files of every repo, look at them, and fetch the weights that the index names."""
    work = [item for item in plan.repos if not item.ready]
    for item in work:
        transfer.expect(item.repo, item.total, item.proven)

    def downloads(weights: bool) -> list[FileDownload]:
        found = []
        for item in work:
            proven = {record.path for record in item.proven}
            named = None
            if weights and item.wanted.file is None and item.listing is not None:
                named = check_index(cache, item.listing)
            for file in item.files:
                asked = is_weight(file) is weights and file.path not in proven
                if asked and (named is None or file.path in named):
                    url, part = hub.url(item.repo, item.commit, file), parts[item.repo].get(file.etag)
                    found.append(FileDownload(item.repo, item.commit, file, url, part))
        return found

    transfer.run(downloads(weights=False))
    check_pair()
    transfer.run(downloads(weights=True))


def _check_pair(plan: PullPlan, cache: Cache, on_event: Callable[[PullEvent], None], allow_mismatch: bool) -> None:
    """Check each drafter against the generations known for its target."""
    target = ", ".join(item.repo for item in plan.repos if item.wanted.role == "target") or "its target"
    for item in plan.repos:
        if item.wanted.role != "drafter":
            continue
        try:
            check_generation(cache, item.repo, item.commit, item.wanted.generations, target)
        except PairError as error:
            if not allow_mismatch:
                raise
            on_event(Notice(f"{error.message}; taken all the same", "warning"))


def _record(
    item: RepoPlan,
    proven: Sequence[ManifestFile],
    hub: Hub,
    cache: Cache,
    manifests: Path | None,
    on_event: Callable[[PullEvent], None],
) -> None:
    """Write the manifest, and what the branch means now, for us and for other programs."""
    files = tuple(proven)
    old = None if item.wanted.file is None else manifests_of.read(manifests, item.repo, item.commit)
    if old is not None:  # other files of the same commit keep their proof
        names = {file.path for file in files}
        files = (*files, *(file for file in old.files if file.path not in names))
    pulled_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if manifests is not None:
        try:
            manifests_of.write(manifests, Manifest(item.repo, item.commit, hub.endpoint, files, pulled_at))
        except OSError as error:
            why = f"could not be recorded ({error.strerror}): the next pull checks it again"
            on_event(Notice(f"the proof of {item.repo} {why}", "warning"))
    if item.branch and cache.ref(item.repo, item.branch) != item.commit:
        ref = cache.repo_folder(item.repo).joinpath("refs", *file_parts(item.repo, item.branch))
        with suppress(OSError):  # a read-only cache: only other programs would have used it
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, item.commit, REF_MODE)


def _parts(item: RepoPlan, cache: Cache, on_event: Callable[[PullEvent], None]) -> dict[str, Path]:
    """Find what earlier pulls left of a repo's files, by blob; what nobody can go on with is deleted."""
    partial = set((cache.repo_folder(item.repo) / "blobs").glob("*.incomplete"))
    if not partial:
        return {}
    wanted = {file.etag for file in item.files}
    freed = cache.drop_orphans(item.repo, wanted)
    parts = {etag: part for etag, part in cache.parts(item.repo).items() if etag in wanted}
    if parts or any(not path.exists() for path in partial):  # they may well be empty: bytes are written late
        text = f"an earlier download of {item.repo} was cut off: its finished files are kept"
        if parts:
            size = byte_size(sum(part.size for part in parts.values()))
            text += f", {size} of unfinished ones go on where they were"
        on_event(Notice(text + (f", {byte_size(freed)} of them removed" if freed else "")))
    return {etag: part.path for etag, part in parts.items()}


def _found(plan: PullPlan, cache: Cache, manifests: Path | None) -> tuple[Local, ...]:
    """Find every repo as it lies in the cache now, and make its commit the one in use."""
    found = []
    for item in plan.repos:
        here = locals_of.find(cache, manifests, item.repo, item.commit, item.wanted.file)
        found.append(locals_of.require(here, item.repo, "dflash pull MODEL"))
        if manifests is not None and found[-1].verified and manifests_of.current(manifests, item.repo) != item.commit:
            with suppress(OSError):  # read-only home
                manifests_of.use(manifests, item.repo, item.commit)
    return tuple(found)
