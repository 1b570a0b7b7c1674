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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflash_local.errors import BusyError, DFlashError
from dflash_local.store import lock
from dflash_local.store import manifest as manifests_of
from dflash_local.store.cache import Cache
from dflash_local.store.names import REMOVING, why_unsafe
from dflash_local.store.owner import started
from dflash_local.tables import listing


@dataclass(frozen=True, slots=True)
class RepoRemoval:
    """Describes what removing one repo means.

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
    shared_with: tuple[str, ...] = ()
    foreign: bool = False
    others: tuple[str, ...] = ()
    in_use: tuple[int, ...] = ()
    downloading: bool = False

    @property
    def delicate(self) -> bool:
        """Say whether it goes only when somebody agrees to it by name, and then whole."""
        return bool(self.shared_with) or self.foreign

    @property
    def why(self) -> str:
        """Tell what speaks against removing it unasked; empty when nothing does."""
        if self.shared_with:
            return f"also used by {listing(self.shared_with)}"
        if self.foreign:
            return "put there by another program"
        return f"{len(self.others)} entries of other programs stay: {listing(self.others, 2)}" if self.others else ""


@dataclass(frozen=True, slots=True)
class Removal:
    """Describes answers what would go; ``remove`` takes it away."""

    cache: Cache
    manifests: Path | None
    locks: Path | None
    repos: tuple[RepoRemoval, ...]


def plan_removal(
    cache: Cache,
    manifests: Path | None,
    locks: Path | None,
    targets: Sequence[str],
    keep: Mapping[str, tuple[str, ...]],
) -> Removal:
    """Plan to remove the repos ``targets``, of those here; ``keep``: repo -> other pairs here that use it."""
    found = (_planned(cache, manifests, locks, repo, keep.get(repo, ())) for repo in dict.fromkeys(targets))
    return Removal(cache, manifests, locks, tuple(item for item in found if item))


def remove(removal: Removal, whole: bool = False) -> int:
    """Move everything out of sight by renaming, then delete it, and what killed removals left.

    A process killed in between leaves a folder that the next removal clears.

    Args:
        whole: also what other programs put into the repos; into a delicate one it goes in any case.

    Returns: the bytes freed.

    Raises:
        BusyError: one of the repos is in use or being downloaded; then nothing has been removed.
        DFlashError: the cache cannot be written.
    """
    cache = removal.cache
    try:
        with ExitStack() as locked:  # keeps pullers and sessions out
            for item in removal.repos:
                locked.enter_context(lock.exclusive(removal.locks, item.repo, purpose="remove", wait=False))
                if pids := lock.users(removal.locks, item.repo):
                    who = ", ".join(map(str, pids))
                    raise BusyError(f"{item.repo} is in use by process {who}", "quit it, then remove again")
                if cache.downloading(item.repo):
                    raise BusyError(f"another program is downloading into {item.folder}", "wait until it has finished")
            trash = _move_to_trash(removal, whole)
        return sum(_delete(cache, folder) for folder in (*trash, *leftovers(cache)))
    except OSError as error:
        where = error.filename or cache.folder
        raise DFlashError(f"{where} cannot be removed: {error.strerror}", "check its permissions") from error


def _planned(
    cache: Cache, manifests: Path | None, locks: Path | None, repo: str, shared_with: tuple[str, ...]
) -> RepoRemoval | None:
    folder = cache.repo_folder(repo)
    there = os.path.lexists(folder)
    recorded = _recorded(manifests, repo)
    left = leftovers(cache, folder.name)
    if not there and not recorded and not left:
        return None
    ours, others = _divided(cache, manifests, repo)
    leftover = sum(_size_of(cache, path) for path in left)
    whole_size = leftover + (_size_of(cache, folder) if there else 0)
    return RepoRemoval(
        repo,
        folder,
        commits=recorded,
        size=leftover + sum(_size_of(cache, path) for path in ours) if others else whole_size,
        whole_size=whole_size,
        shared_with=shared_with,
        foreign=there and not recorded,
        others=others,
        in_use=lock.users(locks, repo),
        downloading=cache.downloading(repo),
    )


def _recorded(manifests: Path | None, repo: str) -> tuple[str, ...]:
    """List the commits that we pulled, or began to."""
    return tuple(dict.fromkeys((*manifests_of.commits(manifests, repo), *manifests_of.begun(manifests, repo))))


def _divided(cache: Cache, manifests: Path | None, repo: str) -> tuple[list[Path], tuple[str, ...]]:
    """Find what is ours alone, entries of snapshots before their blobs, and the names of what is not ours."""
    recorded = _recorded(manifests, repo)
    ours, theirs, others, blobs = list[Path](), list[Path](), list[str](), set[Path | None]()
    for commit in recorded:  # a removal that was killed may have taken the entries, but not yet the blobs
        manifest = manifests_of.read(manifests, repo, commit)
        names = {file.blob for file in manifest.files if not why_unsafe(file.blob)} if manifest else set()
        blobs |= {path for name in names if (path := cache.repo_folder(repo) / "blobs" / name).is_file()}
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
    blobs |= {cache.blob_of(repo, path) for path in ours}
    blobs -= {cache.blob_of(repo, path) for path in theirs} | set(ours)
    return ours + sorted(blob for blob in blobs if blob is not None), tuple(others)


def _move_to_trash(removal: Removal, whole: bool) -> list[Path]:
    """Rename everything into folders beside the repos'; where that fails half-way, everything back. Then forget it."""
    cache, trash, partly = removal.cache, list[Path](), list[RepoRemoval]()
    moved = list[tuple[Path, Path]]()
    try:
        for item in removal.repos:
            paths, others = _divided(cache, removal.manifests, item.repo)
            if others and not whole and not item.delicate:
                partly.append(item)
            else:
                paths = [item.folder] if os.path.lexists(item.folder) else []
            name = f"{item.folder.name}{REMOVING}{os.getpid()}-{secrets.token_hex(4)}"
            trash.append(item.folder.with_name(name))
            for path in paths:
                target = trash[-1] / path.relative_to(item.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.rename(path, target)
                moved.append((path, target))
    except OSError:
        for path, target in reversed(moved):
            with suppress(OSError):
                os.rename(target, path)
        raise
    for item in removal.repos:
        manifests_of.forget(removal.manifests, item.repo, item.commits if item in partly else None)
        if item in partly:
            _tidy(cache, item)
        else:
            shutil.rmtree(cache.hub_locks(item.repo), ignore_errors=True)
    return trash


def _tidy(cache: Cache, item: RepoRemoval) -> None:
    """Delete what only spoke of commits that are gone: empty folders, branches, lists of files."""
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


def leftovers(cache: Cache, folder: str = "*") -> list[Path]:
    """Find what removals left whose process is gone (or is this one), of one repo's folder or of all."""
    found = []
    for path in cache.folder.glob(f"models--{folder.removeprefix('models--')}{REMOVING}*"):
        pid = path.name.rpartition(REMOVING)[2].split("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or started(int(pid)) is None):
            found.append(path)
    return sorted(found)


def _delete(cache: Cache, trash: Path) -> int:
    """Delete what was moved away, and shared blobs that nobody else links to; return the bytes freed."""
    if trash.is_symlink():
        trash.unlink()
        return 0
    files = list(_below(trash))
    stored = {path: shared for path in files if (shared := cache.shared_blob(path)) is not None}
    freed = sum(map(_plain_size, files)) + _swept(cache, stored)
    with suppress(FileNotFoundError):  # another removal clears the same leftover
        shutil.rmtree(trash)
    return freed


def _size_of(cache: Cache, path: Path) -> int:
    """Sum the bytes that deleting a file or folder frees; of a shared file only if no other repo holds it."""
    if path.is_dir() and not path.is_symlink():
        return sum(_size_of(cache, file) for file in _below(path))
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
    """Delete links into the shared store, and of it what nobody else links to; return the bytes freed.

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
