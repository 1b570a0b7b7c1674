"""From names to proven files: what a pull would fetch, whether it fits on the disk, and the pull itself.

The network is asked for listings only until the pull begins, and not even for them where everything is here and proven.
Small files of every repo come first, so that a wrong pair or a torn index costs no gigabytes; the manifest comes last,
so that there is none for half a repo. Knows no screens.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
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
from dflash_local.store.file_download import FileDownload
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
Parts = dict[tuple[str, str], Path]  # by repository and the blob's name


@dataclass(frozen=True, slots=True)
class Wanted:
    """One half of a pair to be pulled: a commit, branch or the main branch (None), what a drafter may look like, and
    which GGUF file is meant (None: a checkpoint of safetensors files).
    """

    role: Literal["target", "drafter"]
    repo: str
    revision: str | None = None
    generations: tuple[Fingerprint, ...] = ()
    file: str | None = None


@dataclass(frozen=True, slots=True)
class RepoPlan:
    """What is to be done for one repo; sizes in bytes.

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
            lacking = f"not enough room in {self.where}: {byte_size(self.need)} needed, {byte_size(self.free)} free"
            raise DoesNotFitError(lacking, "free some space, or set HF_HUB_CACHE to a folder on a larger disk")


def prepare(
    wanted: Sequence[Wanted], hub: Hub, cache: Cache, manifests: Path | None, *, update: bool = False
) -> PullPlan:
    """Look at the Hub, the cache and the disk. DownloadError: a repo cannot be listed or, offline, is incomplete.

    The commit on record is kept unless ``update``, which looks up what the revision means today.
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
    if want.file is not None:
        refuse_unread(want.file)  # before anybody is asked
    recorded = None if update else manifests_of.current(manifests, want.repo)
    revision = recorded or want.revision
    if hub.offline:
        here = locals_of.find(cache, manifests, want.repo, revision, want.file)
        return _ready(want, locals_of.require(here, want.repo, "HF_HUB_OFFLINE=0 dflash pull MODEL"))
    here = None if update else _whole(cache, manifests, want, revision)
    if here is not None:
        return _ready(want, here)
    listing = hub.listing(want.repo, revision)
    branch = "" if is_commit(revision) else revision or MAIN
    return _whole_or_counted(want, listing, branch, cache, manifests)


def _whole_or_counted(want: Wanted, listing: Listing, branch: str, cache: Cache, manifests: Path | None) -> RepoPlan:
    here = _whole(cache, manifests, want, listing.commit)
    return _ready(want, here, branch) if here else _counted(want, listing, branch, cache, manifests)


def _whole(cache: Cache, manifests: Path | None, want: Wanted, revision: str | None) -> Local | None:
    """What is wanted as it lies here, if it is complete and proven."""
    with suppress(CheckpointError):  # a damaged index: the pull replaces it, or finds that the source is damaged
        here = locals_of.find(cache, manifests, want.repo, revision, want.file)
        return here if here is not None and here.complete and here.verified else None
    return None


def _ready(want: Wanted, here: Local, branch: str = "") -> RepoPlan:
    return RepoPlan(want, here.commit, branch, (), here.size, 0, (), 0, True, None)


def _counted(want: Wanted, listing: Listing, branch: str, cache: Cache, manifests: Path | None) -> RepoPlan:
    """What of the listing is wanted, proven, here or to come."""
    files = selected(listing, want.file)
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
        DownloadError: see ``errors_of_hub``. PairError: not a known drafter of its target.
        CheckpointError: an index at the source is damaged.
    """
    work = _Pull(hub, cache, manifests, on_event, cancelled, allow_mismatch)
    if plan.ready:
        work.check_pair(plan)
        return work.found(plan)
    with ExitStack() as held:
        for repo in sorted({item.repo for item in plan.repos}):
            held.enter_context(exclusive(locks, repo, partial(work.waiting, repo), cancelled=cancelled))
        plan = refreshed(plan, cache, manifests)
        if not plan.ready:
            parts = work.parts(plan)
            plan.check_disk()
            work.fetch(plan, parts)
        return work.found(plan)


@dataclass(frozen=True, slots=True)
class _Pull:
    hub: Hub
    cache: Cache
    manifests: Path | None
    on_event: Callable[[PullEvent], None]
    cancelled: Callable[[], bool]
    allow_mismatch: bool

    def fetch(self, plan: PullPlan, parts: Parts) -> None:
        transfer = Transfer(self.hub, self.cache, self.on_event, self.cancelled)
        work = [item for item in plan.repos if not item.ready]
        for item in work:
            transfer.expect(item.repo, item.total, item.proven)
        known = sum(item.unproven for item in work)
        if known:
            self.on_event(Notice(f"checking {byte_size(known)} that are here already and were never verified"))
        try:
            transfer.run([each for item in work for each in self.downloads(item, parts, weights=False)])
            self.check_pair(plan)
            transfer.run([each for item in work for each in self.weights(item, parts)])
        except Interrupted as stop:
            files = [record for records in transfer.records.values() for record in records]
            size = byte_size(sum(record.size for record in files))
            kept = f"{len(files)} finished files ({size}) are kept" if files else "nothing was finished"
            hint = "run it again to go on where it was, also in the middle of a file"
            raise Interrupted(f"pull {stop.message}; {kept}", hint) from stop
        for item in work:
            self._record(item, transfer)

    def weights(self, item: RepoPlan, parts: Parts) -> list[FileDownload]:
        """List the weight files that the index names; all parts of a GGUF file."""
        found = self.downloads(item, parts, weights=True)
        if item.wanted.file is not None or item.listing is None:
            return found
        named = check_index(self.cache, item.listing)
        return [each for each in found if each.file.path in named]

    def downloads(self, item: RepoPlan, parts: Parts, weights: bool) -> list[FileDownload]:
        proven = {record.path for record in item.proven}
        files = [file for file in item.files if is_weight(file) is weights and file.path not in proven]
        return [self.hub.download(item.repo, item.commit, file, parts.get((item.repo, file.etag))) for file in files]

    def waiting(self, repo: str, pid: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        self.on_event(Notice(f"{repo} is being pulled by {who}: waiting for it"))

    def check_pair(self, plan: PullPlan) -> None:
        """Each drafter against the generations known for its target."""
        target = ", ".join(item.repo for item in plan.repos if item.wanted.role == "target") or "its target"
        for item in plan.repos:
            if item.wanted.role != "drafter":
                continue
            try:
                check_generation(self.cache, item.repo, item.commit, item.wanted.generations, target)
            except PairError as error:
                if not self.allow_mismatch:
                    raise
                self.on_event(Notice(f"{error.message}; taken all the same", "warning"))

    def _record(self, item: RepoPlan, transfer: Transfer) -> None:
        """Write the manifest, and what the branch means now, for us and for other programs."""
        files = tuple(transfer.records[item.repo])
        old = None if item.wanted.file is None else manifests_of.read(self.manifests, item.repo, item.commit)
        if old is not None:  # other files of the same commit keep their proof
            names = {file.path for file in files}
            files = (*files, *(file for file in old.files if file.path not in names))
        pulled_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.manifests is not None:
            try:
                record = Manifest(item.repo, item.commit, self.hub.endpoint, files, pulled_at)
                manifests_of.write(self.manifests, record)
            except OSError as error:
                why = f"could not be recorded ({error.strerror}): the next pull checks it again"
                self.on_event(Notice(f"the proof of {item.repo} {why}", "warning"))
        if item.branch and self.cache.ref(item.repo, item.branch) != item.commit:
            ref = self.cache.repo_folder(item.repo).joinpath("refs", *file_parts(item.repo, item.branch))
            with suppress(OSError):  # a read-only cache: only other programs would have used it
                ref.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(ref, item.commit, REF_MODE)

    def parts(self, plan: PullPlan) -> Parts:
        """What earlier pulls left of the plan's files; what nobody can go on with is deleted."""
        found: Parts = {}
        for item in (item for item in plan.repos if not item.ready):
            partial = set((self.cache.repo_folder(item.repo) / "blobs").glob("*.incomplete"))
            if not partial:
                continue
            wanted = {file.etag for file in item.files}
            freed = self.cache.drop_orphans(item.repo, wanted)
            parts = {etag: part for etag, part in self.cache.parts(item.repo).items() if etag in wanted}
            found |= {(item.repo, etag): part.path for etag, part in parts.items()}
            if parts or any(not path.exists() for path in partial):  # they may well be empty: bytes are written late
                text = f"an earlier download of {item.repo} was cut off: its finished files are kept"
                if parts:
                    size = byte_size(sum(part.size for part in parts.values()))
                    text += f", {size} of unfinished ones go on where they were"
                self.on_event(Notice(text + (f", {byte_size(freed)} of them removed" if freed else "")))
        return found

    def found(self, plan: PullPlan) -> tuple[Local, ...]:
        """Every repo as it lies in the cache now, its commit the one in use."""
        found = []
        for item in plan.repos:
            here = locals_of.find(self.cache, self.manifests, item.repo, item.commit, item.wanted.file)
            found.append(locals_of.require(here, item.repo, "dflash pull MODEL"))
            if self.manifests is not None and found[-1].verified:
                if manifests_of.current(self.manifests, item.repo) != item.commit:
                    with suppress(OSError):  # read-only home
                        manifests_of.use(self.manifests, item.repo, item.commit)
        return tuple(found)
