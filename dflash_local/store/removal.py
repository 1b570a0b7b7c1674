"""Taking repos off the disk: what would go, who else needs it, and then all of it or nothing.

Owns the rule that only what our manifests list goes unasked. Knows nothing of how to ask.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_local.errors import BusyError, DFlashError
from dflash_local.store import lock
from dflash_local.store import manifest as manifests_of
from dflash_local.store.cache import Cache
from dflash_local.store.names import why_unsafe
from dflash_local.store.trash import TrashFolder, deleted, leftovers, size_of


@dataclass(frozen=True, slots=True)
class RepoRemoval:
    """What removing one repo means.

    Args:
        size: bytes that go when only what we pulled goes; ``whole_size`` those of the whole folder.
        shared_with: pairs on this machine that use the repo too.
        foreign: no manifest of ours is about it: another program put it there.
        others: what else lies in the folder, commits and files of commits; another program's.
        in_use: processes that have it loaded; ``downloading``: some program is fetching into it.
    """

    repo: str
    folder: Path
    commits: tuple[str, ...]
    size: int
    whole_size: int
    shared_with: tuple[str, ...]
    foreign: bool
    others: tuple[str, ...]
    in_use: tuple[int, ...]
    downloading: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """The answer to "what would go"; ``remove`` does it."""

    cache: Cache
    manifests: Path | None
    locks: Path | None
    repos: tuple[RepoRemoval, ...]

    @property
    def size(self) -> int:
        """Bytes that go unasked."""
        return sum(item.size for item in self.chosen())

    def chosen(self, shared: bool = False, foreign: bool = False) -> tuple[RepoRemoval, ...]:
        """The repos that ``remove`` with the same arguments touches."""
        allowed = (item for item in self.repos if shared or not item.shared_with)
        return tuple(item for item in allowed if foreign or not item.foreign)

    @property
    def shared_with(self) -> dict[str, tuple[str, ...]]:
        """Repos that other pairs here use, with the names of those pairs."""
        return {item.repo: item.shared_with for item in self.repos if item.shared_with}

    @property
    def foreign(self) -> tuple[str, ...]:
        """Repos that another program put there or keeps files in."""
        return tuple(item.repo for item in self.repos if item.foreign or item.others)

    @property
    def in_use(self) -> dict[str, tuple[int, ...]]:
        """Repos that are loaded, with the processes that have them."""
        return {item.repo: item.in_use for item in self.repos if item.in_use}


def plan_removal(
    cache: Cache,
    manifests: Path | None,
    locks: Path | None,
    targets: Sequence[str],
    keep: Mapping[str, tuple[str, ...]],
) -> Removal:
    """What removing the repos ``targets`` means; those not on this machine are left out.

    Args:
        keep: repo -> names of other pairs on this machine that use it.
    """
    repos = dict.fromkeys(targets)
    found = (_planned(cache, manifests, locks, repo, keep.get(repo, ())) for repo in repos)
    return Removal(cache, manifests, locks, tuple(item for item in found if item))


def remove(removal: Removal, *, shared: bool = False, foreign: bool = False) -> int:
    """Do it: first everything is moved out of sight by renaming, then deleted.

    A process killed in between leaves a folder that the next removal clears. By default what other
    pairs use stays, and so does what other programs put there, be it a whole repo or a part of one.

    Args:
        shared: also what other pairs use. foreign: also what other programs put there.

    Returns: the bytes freed.

    Raises:
        BusyError: one of the repos is in use or being downloaded; then nothing has been removed.
        DFlashError: the cache cannot be written.
    """
    cache, chosen = removal.cache, removal.chosen(shared, foreign)
    try:
        with _held(removal, chosen):
            trash_folders = _move_to_trash(removal, chosen, foreign)
        return sum(deleted(cache, trash_folder.path) for trash_folder in trash_folders) + clear_leftovers(cache)
    except OSError as error:
        where = error.filename or cache.folder
        raise DFlashError(f"{where} cannot be removed: {error.strerror}", "check its permissions") from error


def clear_leftovers(cache: Cache) -> int:
    """Delete what killed removals left in the cache. Returns: the bytes freed."""
    return sum(deleted(cache, trash_folder) for trash_folder in leftovers(cache))


def _planned(
    cache: Cache, manifests: Path | None, locks: Path | None, repo: str, shared_with: tuple[str, ...]
) -> RepoRemoval | None:
    folder = cache.repo_folder(repo)
    there = os.path.lexists(folder)
    recorded = manifests_of.commits(manifests, repo)
    left = leftovers(cache, folder.name)
    if not there and not recorded and not left:
        return None
    ours, others = _divided(cache, manifests, repo)
    leftover = sum(size_of(cache, trash_folder) for trash_folder in left)
    whole_size = leftover + (size_of(cache, folder) if there else 0)
    return RepoRemoval(
        repo,
        folder,
        commits=recorded,
        size=leftover + sum(size_of(cache, path) for path in ours) if others else whole_size,
        whole_size=whole_size,
        shared_with=shared_with,
        foreign=there and not recorded,
        others=others,
        in_use=lock.users(locks, repo),
        downloading=cache.downloading(repo),
    )


def _divided(cache: Cache, manifests: Path | None, repo: str) -> tuple[list[Path], tuple[str, ...]]:
    """What is ours alone, entries of snapshots before their blobs, and the names of what is not ours."""
    recorded = manifests_of.commits(manifests, repo)
    ours: list[Path] = []
    theirs: list[Path] = []
    others: list[str] = []
    blobs: set[Path | None] = set()
    for commit in cache.commits(repo):
        paths = cache.files(repo, commit)
        if commit not in recorded:
            others.append(commit)
            theirs.extend(paths)
            continue
        manifest = manifests_of.read(manifests, repo, commit)
        listed = {file.path for file in manifest.files} if manifest else None
        for path in paths:
            name = path.relative_to(cache.snapshot(repo, commit)).as_posix()
            if listed is None or name in listed:
                ours.append(path)
            else:
                theirs.append(path)
                others.append(f"{commit[:8]}/{name}")
    for commit in recorded:  # a removal that was killed may have taken the entries, but not yet the blobs
        manifest = manifests_of.read(manifests, repo, commit)
        names = {file.blob for file in manifest.files if not why_unsafe(file.blob)} if manifest else set()
        blobs |= {path for name in names if (path := cache.repo_folder(repo) / "blobs" / name).is_file()}
    blobs |= {cache.blob_of(repo, path) for path in ours}
    blobs -= {cache.blob_of(repo, path) for path in theirs} | set(ours)
    return ours + sorted(blob for blob in blobs if blob is not None), tuple(others)


@contextmanager
def _held(removal: Removal, chosen: Sequence[RepoRemoval]) -> Iterator[None]:
    """Keep pullers and sessions out of the repos, or say who is in."""
    with ExitStack() as stack:
        for item in chosen:
            stack.enter_context(lock.exclusive(removal.locks, item.repo, purpose="remove", wait=False))
            pids = lock.users(removal.locks, item.repo)
            if pids:
                names = ", ".join(map(str, pids))
                raise BusyError(f"{item.repo} is in use by process {names}", "quit it, then remove again")
            if removal.cache.downloading(item.repo):
                raise BusyError(f"another program is downloading into {item.folder}", "wait until it has finished")
        yield


def _move_to_trash(removal: Removal, chosen: Sequence[RepoRemoval], foreign: bool) -> list[TrashFolder]:
    """Rename everything out of sight; where that fails half-way, everything back. Then forget it."""
    trash_folders: list[TrashFolder] = []
    parts: list[RepoRemoval] = []
    try:
        for item in chosen:
            ours, others = _divided(removal.cache, removal.manifests, item.repo)
            trash_folders.append(TrashFolder(item.folder))
            if others and not foreign:
                parts.append(item)
                for path in ours:
                    trash_folders[-1].take(path)
            elif os.path.lexists(item.folder):
                trash_folders[-1].take_all()
    except OSError:
        for trash_folder in reversed(trash_folders):
            trash_folder.give_back()
        raise
    for item in chosen:
        manifests_of.forget(removal.manifests, item.repo, item.commits if item in parts else None)
        if item in parts:
            _tidy(removal.cache, item)
        else:
            shutil.rmtree(removal.cache.hub_locks(item.repo), ignore_errors=True)
    return trash_folders


def _tidy(cache: Cache, item: RepoRemoval) -> None:
    """Take away what only spoke of commits that are gone: empty folders, branches, lists of files."""
    own = {name: item.folder / name for name in ("snapshots", ".no_exist", "trees", "refs")}
    own = {name: path for name, path in own.items() if path.is_dir() and not path.is_symlink()}
    for commit in item.commits if "snapshots" in own and not item.folder.is_symlink() else ():
        if cache.files(item.repo, commit):
            continue
        for path in (own[name] / commit for name in ("snapshots", ".no_exist") if name in own):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
        if "trees" in own:
            (own["trees"] / f"{commit}.json").unlink(missing_ok=True)
        for path in sorted(own["refs"].rglob("*")) if "refs" in own else ():
            name = path.relative_to(own["refs"]).as_posix()
            if path.is_file() and not why_unsafe(name) and cache.ref(item.repo, name) == commit:
                path.unlink()
