"""From names to proven files: what a pull would fetch, whether it fits on the disk, and the pull itself.

Small files of every repo come first, so that a wrong pair or a torn index costs no gigabytes; the
manifest comes last, so that there is none for half a repo. Knows no screens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from dflash_local.errors import Interrupted, PairError
from dflash_local.events import Notice
from dflash_local.store import local as locals_of
from dflash_local.store import manifest as manifests_of
from dflash_local.store.atomic import write_atomic
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub
from dflash_local.store.local import Local
from dflash_local.store.lock import exclusive
from dflash_local.store.manifest import Manifest
from dflash_local.store.names import file_parts
from dflash_local.store.pull_plan import PullPlan, RepoPlan, Wanted, prepare, refreshed
from dflash_local.store.selection import is_weight
from dflash_local.store.transfer import DownloadTask, PullEvent, Transfer
from dflash_local.store.verify import check_generation, check_index
from dflash_local.terminal import byte_size

__all__ = ["PullPlan", "RepoPlan", "Wanted", "prepare", "pull"]

REF_MODE = 0o644  # as every other program writes it
Parts = dict[tuple[str, str], Path]  # by repository and the blob's name


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

    Waits for another process that pulls one of them. A plan that needs nothing opens no socket and
    writes nothing.

    Args:
        manifests, locks: where records and locks go; None keeps none.
        cancelled: polled about ten times a second; True ends the pull within two seconds.
        allow_mismatch: a drafter of an unknown generation is only warned of.

    Raises:
        Interrupted: cancelled or Ctrl-C; says what is kept. DoesNotFitError: the disk is or became full.
        DownloadError: see ``errors_of_hub``. PairError: not a known drafter of its target.
        CheckpointError: an index at the source is damaged.
    """
    if plan.ready:
        _check_pair(plan, cache, allow_mismatch, on_event)
        return _found(plan, cache, manifests)
    with ExitStack() as held:
        for repo in sorted({item.repo for item in plan.repos}):
            waiting = _waiting(repo, on_event)
            held.enter_context(exclusive(locks, repo, waiting, cancelled=cancelled))
        plan = refreshed(plan, cache, manifests)
        if not plan.ready:
            parts = _parts(plan, cache, on_event)
            plan.check_disk()
            _fetch(plan, parts, hub, cache, manifests, on_event, cancelled, allow_mismatch)
        return _found(plan, cache, manifests)


def _fetch(
    plan: PullPlan,
    parts: Parts,
    hub: Hub,
    cache: Cache,
    manifests: Path | None,
    on_event: Callable[[PullEvent], None],
    cancelled: Callable[[], bool],
    allow_mismatch: bool,
) -> None:
    client = hub.client()
    transfer = Transfer(hub, cache, client, on_event, cancelled)
    work = [item for item in plan.repos if not item.ready]
    for item in work:
        transfer.expect(item.repo, item.total, item.proven)
    known = sum(item.unproven for item in work)
    if known:
        on_event(Notice(f"checking {byte_size(known)} that are here already and were never verified"))
    try:
        with client.in_use():
            transfer.run([task for item in work for task in _tasks(item, parts, weights=False)])
            _check_pair(plan, cache, allow_mismatch, on_event)
            needed = {item.repo: check_index(cache, item.listing) for item in work if item.listing}
            weights = [task for item in work for task in _tasks(item, parts, weights=True)]
            transfer.run([task for task in weights if task.file.path in needed[task.repo]])
    except Interrupted as stop:
        files = [record for records in transfer.records.values() for record in records.values()]
        size = byte_size(sum(record.size for record in files))
        kept = f"{len(files)} finished files ({size}) are kept" if files else "nothing was finished"
        raise Interrupted(
            f"pull {stop.message}; {kept}", "run it again to go on where it was, also in the middle of a file"
        ) from stop
    for item in work:
        _record(item, hub, cache, manifests, transfer, on_event)


def _tasks(item: RepoPlan, parts: Parts, weights: bool) -> list[DownloadTask]:
    proven = {record.path for record in item.proven}
    files = [file for file in item.files if is_weight(file) is weights and file.path not in proven]
    return [DownloadTask(item.repo, item.commit, file, parts.get((item.repo, file.etag))) for file in files]


def _check_pair(plan: PullPlan, cache: Cache, allow_mismatch: bool, on_event: Callable[[PullEvent], None]) -> None:
    """Each drafter against the generations known for its target."""
    targets = [item.repo for item in plan.repos if item.wanted.role == "target"]
    for item in plan.repos:
        if item.wanted.role != "drafter":
            continue
        try:
            target = ", ".join(targets) or "its target"
            check_generation(cache, item.repo, item.commit, item.wanted.generations, target)
        except PairError as error:
            if not allow_mismatch:
                raise
            on_event(Notice(f"{error.message}; taken all the same", "warning"))


def _record(
    item: RepoPlan,
    hub: Hub,
    cache: Cache,
    manifests: Path | None,
    transfer: Transfer,
    on_event: Callable[[PullEvent], None],
) -> None:
    """Write the manifest, and what the branch means now, for us and for other programs."""
    files = tuple(transfer.records[item.repo].values())
    pulled_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if manifests is not None:
        try:
            manifests_of.write(manifests, Manifest(item.repo, item.commit, hub.endpoint, files, pulled_at))
        except OSError as error:
            text = f"the proof of {item.repo} could not be recorded ({error.strerror}): the next pull checks it again"
            on_event(Notice(text, "warning"))
    if item.branch and cache.ref(item.repo, item.branch) != item.commit:
        ref = cache.repo_folder(item.repo).joinpath("refs", *file_parts(item.repo, item.branch))
        with suppress(OSError):  # a read-only cache: only other programs would have used it
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, item.commit, REF_MODE)


def _parts(plan: PullPlan, cache: Cache, on_event: Callable[[PullEvent], None]) -> Parts:
    """What earlier pulls left of the plan's files; what nobody can go on with is deleted."""
    found: Parts = {}
    for item in (item for item in plan.repos if not item.ready):
        partial = set((cache.repo_folder(item.repo) / "blobs").glob("*.incomplete"))
        if not partial:
            continue
        wanted = {file.etag for file in item.files}
        freed = cache.drop_orphans(item.repo, wanted)
        parts = {etag: part for etag, part in cache.parts(item.repo).items() if etag in wanted}
        found |= {(item.repo, etag): part.path for etag, part in parts.items()}
        if parts or any(not path.exists() for path in partial):  # they may well be empty: bytes are written late
            more = [f"{byte_size(sum(part.size for part in parts.values()))} of unfinished ones go on where they were"]
            more = (more if parts else []) + ([f"{byte_size(freed)} of them removed"] if freed else [])
            text = f"an earlier download of {item.repo} was cut off: its finished files are kept"
            on_event(Notice(", ".join([text, *more])))
    return found


def _waiting(repo: str, on_event: Callable[[PullEvent], None]) -> Callable[[int | None], None]:
    def on_wait(pid: int | None) -> None:
        who = f"process {pid}" if pid is not None else "another process"
        on_event(Notice(f"{repo} is being pulled by {who}: waiting for it"))

    return on_wait


def _found(plan: PullPlan, cache: Cache, manifests: Path | None) -> tuple[Local, ...]:
    """Every repo as it lies in the cache now, its commit the one in use."""
    found = []
    for item in plan.repos:
        here = locals_of.find(cache, manifests, item.repo, item.commit)
        found.append(locals_of.require(here, item.repo, "dflash pull MODEL"))
        if manifests is not None and here is not None and here.verified:
            if manifests_of.current(manifests, item.repo) != item.commit:
                with suppress(OSError):  # read-only home
                    manifests_of.use(manifests, item.repo, item.commit)
    return tuple(found)
