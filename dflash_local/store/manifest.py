"""What was pulled and proven: one JSON file per commit, and the commit in use of each repo.

A pull that was begun leaves a mark beside them, until it is finished.
A record that cannot be read is as good as none, and is never deleted for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local.errors import DownloadError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.atomic import write_atomic
from dflash_local.store.cache import Entry
from dflash_local.store.names import folder_name, is_commit, why_unsafe

VERSION = 1
POINTER = "current.json"
BEGUN = ".begun"  # behind the commit of a pull
MAX_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """Describes a verified file: bytes, the sha256 it was found to have, its blob, and its time then, if known."""

    path: str
    size: int
    sha256: str | None
    blob: str
    mtime_ns: int | None = None

    def differs(self, entry: Entry) -> bool:
        """Say whether the file on disk is not the one that was verified, by size and time alone."""
        return entry.size != self.size or (self.mtime_ns is not None and entry.mtime_ns != self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a commit whose files are all there and verified, where they came from and when (ISO 8601)."""

    repo: str
    commit: str
    endpoint: str
    files: tuple[ManifestFile, ...]
    pulled_at: str


def folder_of(settings: Settings) -> Path | None:
    """Return where manifests are kept; None when there is no home folder."""
    return settings.data_dir / "manifests" if settings.data_dir else None


def load(folder: Path | None, repo: str, commit: str | None = None) -> tuple[Manifest | None, str]:
    """Read the manifest of a commit, by default the one in use; or say why there is none to rely on."""
    commit = commit or current(folder, repo)
    if folder is None or not is_commit(commit):
        return None, ""
    path = folder / folder_name(repo) / f"{commit}.json"
    try:
        raw = _read_json(path)
        if raw is None:
            return None, ""
        manifest = _decoded(raw)
        if (manifest.repo, manifest.commit) != (repo, commit):
            raise ValueError("is about something else")
    except ValueError as error:
        return None, f"{path.name} of {repo} {error}: its files count as not verified"
    return manifest, ""


def read(folder: Path | None, repo: str, commit: str | None = None) -> Manifest | None:
    """Read the manifest of a commit, by default the one in use; None when there is none to rely on."""
    return load(folder, repo, commit)[0]


def write(folder: Path, manifest: Manifest, in_use: bool = True) -> None:
    """Record a verified commit, with ``in_use`` as the one to take; an unreadable record is kept beside. OSError."""
    home = folder / folder_name(manifest.repo)
    path = home / f"{manifest.commit}.json"
    if path.exists() and read(folder, manifest.repo, manifest.commit) is None:
        kept = (path.with_name(f"{path.name}.old{number}") for number in range(1, 1000))
        os.replace(path, next(name for name in kept if not name.exists()))
    write_atomic(path, json.dumps({"version": VERSION, **asdict(manifest)}, indent=1) + "\n")
    path.with_suffix(BEGUN).unlink(missing_ok=True)
    if in_use:
        use(folder, manifest.repo, manifest.commit)


def use(folder: Path, repo: str, commit: str) -> None:
    """Make a commit the one that later runs take. OSError: it cannot be written."""
    if not is_commit(commit):
        raise DownloadError(f"{commit!r} is not a commit of {repo}")
    record = {"version": VERSION, "repo": repo, "commit": commit}
    write_atomic(folder / folder_name(repo) / POINTER, json.dumps(record) + "\n")


def current(folder: Path | None, repo: str) -> str | None:
    """Return the commit in use, whether or not its manifest can be read; None when none was recorded."""
    if folder is None:
        return None
    try:
        raw = _read_json(folder / folder_name(repo) / POINTER)
    except ValueError:
        raw = None
    commit = raw.get("commit") if isinstance(raw, dict) and raw.get("repo") == repo else None
    if isinstance(commit, str) and is_commit(commit):
        return commit
    only = commits(folder, repo)
    return only[0] if len(only) == 1 else None


def commits(folder: Path | None, repo: str) -> tuple[str, ...]:
    """List the commits with a record, readable or not."""
    return _commits(folder, repo, ".json")


def begin(folder: Path, repo: str, commit: str) -> None:
    """Mark a commit of which nothing is here yet: what comes of it is ours. OSError: it cannot be written."""
    write_atomic(folder / folder_name(repo) / f"{commit}{BEGUN}", "")


def begun(folder: Path | None, repo: str) -> tuple[str, ...]:
    """List the commits whose pull was begun and not finished."""
    return _commits(folder, repo, BEGUN)


def _commits(folder: Path | None, repo: str, suffix: str) -> tuple[str, ...]:
    if folder is None:
        return ()
    home = folder / folder_name(repo)
    names = sorted(path.stem for path in home.glob(f"*{suffix}")) if home.is_dir() else []
    return tuple(name for name in names if is_commit(name))


def forget(folder: Path | None, repo: str, only: Iterable[str] | None = None) -> None:
    """Delete the records of a repo, or those of some commits, whose files were removed. OSError."""
    if folder is None:
        return
    home = folder / folder_name(repo)
    gone = set((*commits(folder, repo), *begun(folder, repo)) if only is None else only)
    if only is None or current(folder, repo) in gone:
        (home / POINTER).unlink(missing_ok=True)
    for commit in sorted(gone):
        (home / f"{commit}.json").unlink(missing_ok=True)
        (home / f"{commit}{BEGUN}").unlink(missing_ok=True)
    with suppress(OSError):  # other records, or somebody's file
        home.rmdir()


def _read_json(path: Path) -> Any:
    """Read a file; None when there is none. Raises ValueError in words for one that is no JSON."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    if len(raw) > MAX_BYTES:
        raise ValueError("is too large")
    try:
        return parse_json(raw)
    except ValueError as error:
        raise ValueError("is damaged") from error


def _decoded(raw: Any) -> Manifest:
    version = raw.get("version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ValueError("was written by a newer version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError("has an older or unknown layout")
    try:
        files = tuple(_decoded_file(file) for file in raw["files"])
        words = [raw[key] for key in ("repo", "commit", "endpoint", "pulled_at")]
        if not files or not all(isinstance(word, str) for word in words):
            raise ValueError
        return Manifest(words[0], words[1], words[2], files, words[3])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("is damaged") from error


def _decoded_file(raw: Any) -> ManifestFile:
    file = ManifestFile(raw["path"], raw["size"], raw["sha256"], raw["blob"], raw["mtime_ns"])
    numbers = [number for number in (file.size, file.mtime_ns) if number is not None]
    texts = [text for text in (file.path, file.blob, file.sha256) if text is not None]
    right = all(type(number) is int and number >= 0 for number in numbers) and all(type(text) is str for text in texts)
    if not right or len(texts) < 2 or not numbers or why_unsafe(file.path):
        raise ValueError
    return file
