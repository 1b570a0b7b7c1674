"""Taking repos off the disk: what would go, who else needs it, and then all of it or nothing.

Owns the rule that only what our manifests list goes unasked. Deletes without halves: what goes is renamed out of sight
first, and deleted under its new name. Knows nothing of how to ask.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflash_local.errors import BusyError, DFlashError
from dflash_local.store import lock
from dflash_local.store import manifest as manifests_of
from dflash_local.store.cache import Cache
from dflash_local.store.names import REMOVING, why_unsafe
from dflash_local.store.owner import started


@dataclass(frozen=True, slots=True)
class RepoRemoval:
    """What removing one repo means.

    Attributes:
        size: bytes that go when only what we pulled goes; ``whole_size`` those of the whole folder.
        shared_with: pairs on this machine that use the repo too. foreign: no manifest of ours is about it.
        others: commits and files of commits that another program put there.
        in_use: processes that have it loaded. downloading: some program is fetching into it.
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

    def chosen(self, shared: bool = False, foreign: bool = False) -> tuple[RepoRemoval, ...]:
        """The repos that ``remove`` with the same arguments touches."""
        allowed = (item for item in self.repos if shared or not item.shared_with)
        return tuple(item for item in allowed if foreign or not item.foreign)

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
    """What removing the repos ``targets`` means, of those here; ``keep``: repo -> other pairs here that use it."""
    found = (_planned(cache, manifests, locks, repo, keep.get(repo, ())) for repo in dict.fromkeys(targets))
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
    ours, theirs, others, blobs = list[Path](), list[Path](), list[str](), set[Path | None]()
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
                trash_folders[-1].take(item.folder)
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
    paths = (item.folder / name for name in ("snapshots", ".no_exist", "trees", "refs"))
    own = {path.name: path for path in paths if _is_folder(path)}
    for commit in item.commits if "snapshots" in own and not item.folder.is_symlink() else ():
        if cache.files(item.repo, commit):
            continue
        for path in (own[name] / commit for name in ("snapshots", ".no_exist") if name in own):
            if _is_folder(path):
                shutil.rmtree(path, ignore_errors=True)
        if "trees" in own:
            (own["trees"] / f"{commit}.json").unlink(missing_ok=True)
        for path in sorted(own["refs"].rglob("*")) if "refs" in own else ():
            name = path.relative_to(own["refs"]).as_posix()
            if path.is_file() and not why_unsafe(name) and cache.ref(item.repo, name) == commit:
                path.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


class TrashFolder:
    """A folder beside a repo's, named ``<repo folder>.removing-<process>-<random>``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder.with_name(f"{folder.name}{REMOVING}{os.getpid()}-{secrets.token_hex(4)}")
        self._moved: list[tuple[Path, Path]] = []

    def take(self, path: Path) -> None:
        """Rename a file of the repo, or its whole folder."""
        target = self.path / path.relative_to(self.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, target)
        self._moved.append((path, target))

    def give_back(self) -> None:
        """Everything to where it was, as far as that is possible."""
        for source, target in reversed(self._moved):
            with suppress(OSError):
                os.rename(target, source)
        self._moved.clear()


def leftovers(cache: Cache, folder: str = "*") -> list[Path]:
    """Trash folders whose process is gone (or is this one), of one repo's folder or of all."""
    found = []
    for trash_folder in cache.folder.glob(f"models--{folder.removeprefix('models--')}{REMOVING}*"):
        pid = trash_folder.name.rpartition(REMOVING)[2].split("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or started(int(pid)) is None):
            found.append(trash_folder)
    return sorted(found)


def deleted(cache: Cache, trash_folder: Path) -> int:
    """Delete a trash folder, and of the store shared between repos what nobody links to; returns the bytes freed."""
    if trash_folder.is_symlink():
        trash_folder.unlink()
        return 0
    files = list(_below(trash_folder))
    stored = {path: shared for path in files if (shared := cache.shared_blob(path)) is not None}
    freed = sum(map(_plain_size, files)) + _swept(cache, stored)
    with suppress(FileNotFoundError):  # another removal clears the same leftover
        shutil.rmtree(trash_folder)
    return freed


def size_of(cache: Cache, path: Path) -> int:
    """Bytes that deleting a file or folder of the cache frees; of a shared file only if no other repo holds it."""
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(cache, file) for file in _below(path))
    shared = cache.shared_blob(path)
    if shared is None:
        return _plain_size(path)
    repo = path.relative_to(cache.folder).parts[0].split(REMOVING)[0]
    try:
        holders = shared.with_name(f"{shared.name}.refs").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return _plain_size(shared) if all(line.startswith(f"{repo}/") for line in holders) else 0


def _swept(cache: Cache, stored: Mapping[Path, Path]) -> int:
    """Delete links into the shared store, and of it what nobody else links to; returns the bytes freed.

    Its locks and lists are huggingface_hub's alone, which has had such a store since its strategies know their cache.
    """
    if not stored:
        return 0
    import huggingface_hub

    known = {field.name for field in fields(huggingface_hub.DeleteCacheStrategy)}
    if "cache_dir" not in known:
        return 0
    sizes = {file: _plain_size(file) for file in stored.values()}
    options: dict[str, Any] = {name: frozenset() for name in ("refs", "repos", "snapshots")}
    options |= {"expected_freed_size": sum(sizes.values()), "blobs": frozenset(stored), "cache_dir": cache.folder}
    huggingface_hub.DeleteCacheStrategy(**options).execute()
    return sum(size for file, size in sizes.items() if not file.exists())


def _plain_size(path: Path) -> int:
    try:
        kind = os.lstat(path)
    except FileNotFoundError:
        return 0
    return kind.st_size if stat.S_ISREG(kind.st_mode) and kind.st_nlink == 1 else 0


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (Path(place, name) for name in (*files, *links))
