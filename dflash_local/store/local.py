"""What is on this machine: the commit of a repo, whether its files are all there and verified, by names and headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_local.checkpoint_files.safetensors_folder import CONFIG, INDEX
from dflash_local.errors import DFlashError, DownloadError
from dflash_local.store import manifest as manifests_of
from dflash_local.store.cache import Cache, Entry
from dflash_local.store.manifest import ManifestFile
from dflash_local.store.names import is_commit, parts_of
from dflash_local.store.weights import check_files, is_weights, needed
from dflash_local.tables import listing

NAMED = 5  # files listed in one message


@dataclass(frozen=True, slots=True)
class Local:
    """Describes a commit of a repo on this disk.

    Args:
        folder: its snapshot, or the GGUF file in it: what a checkpoint is opened from.
        files: what is there; ``size`` their bytes.
        missing: files that are absent or cut short; empty when it can be loaded.
        verified: every file's bytes were proven when pulled, and none has been touched since.
        changed: files touched since, to be verified again.
        notice: why it is not verified, when there is more to say than that nobody did it.
        problem: why it cannot be used at all (``scan`` only; ``find`` raises it).
    """

    repo: str
    commit: str
    folder: Path
    files: tuple[Entry, ...]
    size: int
    missing: tuple[str, ...]
    verified: bool
    changed: tuple[str, ...] = ()
    notice: str = ""
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Say whether it can be loaded."""
        return not self.missing and not self.problem


def find(
    cache: Cache, manifests: Path | None, repo: str, revision: str | None = None, file: str | None = None
) -> Local | None:
    """Find the repo, or one GGUF file of it, as it lies in the cache; None when nothing of that does.

    The commit is ``revision`` where that is one, else the one recorded as in use, else what the
    branch meant when last downloaded, else the only one there. A cache filled by another program
    will do: it is merely not verified.

    Raises:
        DownloadError: an entry leads out of the repo, see ``Cache.entry``.
        CheckpointError: the index is damaged, or two files hold one tensor.
    """
    commit = commit_of(cache, manifests, repo, revision)
    if commit is None:
        return None
    if file is not None:
        return _of_file(cache, manifests, repo, commit, file)
    return _examined(cache, manifests, repo, commit, headers=True)


def _of_file(cache: Cache, manifests: Path | None, repo: str, commit: str, file: str) -> Local | None:
    """Look at a GGUF file with the other parts that it was split into, and at nothing else of its repo."""
    names = parts_of(file)
    there = {name: entry for name in names if (entry := cache.entry(repo, commit, name)) is not None}
    if not there:
        return None
    manifest = manifests_of.read(manifests, repo, commit)
    records = {each.path: each for each in manifest.files if each.path in names} if manifest else {}
    missing, changed = _against(records.values(), there)
    missing |= {name for name in names if name not in there}
    verified = not missing and not changed and there.keys() <= records.keys()
    place, entries = cache.snapshot(repo, commit).joinpath(*file.split("/")), tuple(there.values())
    size = sum(entry.size for entry in entries)
    return Local(repo, commit, place, entries, size, tuple(sorted(missing)), verified, tuple(sorted(changed)))


def commit_of(cache: Cache, manifests: Path | None, repo: str, revision: str | None = None) -> str | None:
    """Return the commit that ``find`` takes; None when there is none of it on this disk or on record."""
    there = cache.commits(repo)
    if is_commit(revision):
        known = revision in there or manifests_of.read(manifests, repo, revision) is not None
        return revision if known else None
    recorded = manifests_of.current(manifests, repo)
    if recorded is not None and (recorded in there or manifests_of.read(manifests, repo, recorded) is not None):
        return recorded
    ref = cache.ref(repo, revision or "main")
    if ref in there:
        return ref
    return there[0] if len(there) == 1 and revision is None else None


def scan(cache: Cache, manifests: Path | None) -> tuple[Local, ...]:
    """List every repo of the cache with a snapshot, by name; what is wrong with one stands in its ``problem``."""
    found = []
    for repo in cache.repos():
        commit = None
        try:
            there = cache.commits(repo)
            commit = commit_of(cache, manifests, repo) or next(iter(there), None)
            if commit is not None and there:
                found.append(_examined(cache, manifests, repo, commit, headers=False))
        except DFlashError as error:
            if commit is not None:
                folder = cache.snapshot(repo, commit)
                found.append(Local(repo, commit, folder, (), 0, (), False, problem=error.message))
    return tuple(found)


def require(local: Local | None, repo: str, command: str) -> Local:
    """Return the repo, complete. DownloadError: it is not here, or files are missing; the hint is to ``command``."""
    if local is None:
        raise DownloadError(f"{repo} is not on this machine", f"fetch it with `{command}`")
    if local.missing:
        names = listing(local.missing, NAMED)
        raise DownloadError(f"{repo} is not complete: {names} missing", f"fetch the rest with `{command}`")
    return local


def _examined(cache: Cache, manifests: Path | None, repo: str, commit: str, headers: bool) -> Local:
    manifest, notice = manifests_of.load(manifests, repo, commit)
    entries = cache.entries(repo, commit)
    there = {entry.name: entry for entry in entries}
    missing, changed = _against(manifest.files if manifest else (), there)
    weights = needed(cache, repo, there)
    if manifest and not weights & set(there) and any(map(is_weights, missing)):
        weights = set()  # the manifest knows the names better
    missing |= (weights | {CONFIG}) - set(there)
    missing |= weights & {INDEX}  # there, but damaged
    verified = manifest is not None and not missing and not changed
    if headers and not verified:
        missing |= check_files(cache, repo, [there[name] for name in sorted(weights - missing) if name != INDEX])
    size = sum(entry.size for entry in entries)
    if changed:
        notice = f"{repo}: {', '.join(sorted(changed)[:NAMED])} changed since the download was verified"
    folder = cache.snapshot(repo, commit)
    return Local(repo, commit, folder, entries, size, tuple(sorted(missing)), verified, tuple(sorted(changed)), notice)


def _against(files: Iterable[ManifestFile], there: dict[str, Entry]) -> tuple[set[str], set[str]]:
    """Find the recorded files that are gone or of another size, and those that were touched."""
    missing, changed = set(), set()
    for file in files:
        entry = there.get(file.path)
        if entry is None or entry.size != file.size:
            missing.add(file.path)
        elif file.differs(entry):
            changed.add(file.path)
    return missing, changed
