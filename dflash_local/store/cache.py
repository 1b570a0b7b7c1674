"""The Hugging Face cache on disk: repos, commits and the files of a snapshot, each proven to lie inside.

Trusts no entry: what is neither a plain file nor a link to a blob of its repo is refused. No network.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dflash_local.errors import DownloadError
from dflash_local.store.lock import is_locked
from dflash_local.store.names import file_parts, folder_name, is_commit, repo_of, shortened

AGAIN = "remove it and run `dflash pull` again"
# The store that huggingface_hub shares between repos: a blob may be a link to one of its files.
SHARED = "blobs"
SHARED_MARKER = ".huggingface-shared-blobs"
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")
PART = ".dflash-"  # in the names of our partial files, which are continued; huggingface_hub's are not
_INCOMPLETE = re.compile(r"(?P<etag>.+?)(?:(?:\.|(?P<part>\.dflash-))[0-9a-f]{8})?\.incomplete")
QUIET_S = 2.0  # a download that goes on writes more often than this
QUIET_UNLOCKED_S = 600.0  # where the lock says nothing, only age does


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes a file of a snapshot: ``path`` is its place there, ``file`` the plain file that holds the bytes.

    ``blob`` is the file in the repo's ``blobs`` folder, the same as ``path`` in a cache without links.
    """

    name: str
    path: Path
    blob: Path
    file: Path
    size: int
    mtime_ns: int


class KeptPart(NamedTuple):
    """Holds what an earlier pull left of a blob, in bytes."""

    path: Path
    size: int


class Cache:
    """Reads the cache in ``folder``, which need not exist. Nothing here writes, but ``drop_orphans``."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))

    def repo_folder(self, repo: str) -> Path:
        """Return where the repo lies or would lie. DownloadError: the id is no id."""
        return self.folder / folder_name(repo)

    def snapshot(self, repo: str, commit: str) -> Path:
        """Return where the files of a commit lie or would lie. DownloadError: ``commit`` is not a full commit hash."""
        if not is_commit(commit):
            raise DownloadError(f"{shortened(commit)} is not a commit of {repo}", "give its 40 hexadecimal digits")
        return self.repo_folder(repo) / "snapshots" / commit

    def repos(self) -> tuple[str, ...]:
        """List every model repo with a folder here, by name."""
        found = (repo_of(item.name) for item in _scanned(self.folder) if item.is_dir(follow_symlinks=False))
        return tuple(sorted(repo for repo in found if repo))

    def commits(self, repo: str) -> tuple[str, ...]:
        """List the commits with a snapshot, the latest written first."""
        items = _scanned(self.repo_folder(repo) / "snapshots")
        folders = [item for item in items if is_commit(item.name) and _leads_to_folder(item)]
        folders.sort(key=lambda item: (item.stat(follow_symlinks=False).st_mtime_ns, item.name), reverse=True)
        return tuple(item.name for item in folders)

    def ref(self, repo: str, name: str = "main") -> str | None:
        """Return the commit that a branch or tag meant when it was last downloaded."""
        path = self.repo_folder(repo).joinpath("refs", *file_parts(repo, name))
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return None
            with path.open("rb") as file:
                text = file.read(100).decode("ascii", "replace").strip()
        except OSError:
            return None
        return text if is_commit(text) else None

    def entry(self, repo: str, commit: str, name: str) -> Entry | None:
        """Find the file ``name`` of a snapshot; None when it is not there (or its blob is gone).

        Raises:
            DownloadError: the entry or a folder on the way is a link that leads anywhere but to a blob
                of this repo, or is no file at all.
        """
        parts = file_parts(repo, name)
        self._check_folders(repo, commit, parts[:-1])
        return self._resolved(repo, name, self.snapshot(repo, commit).joinpath(*parts))

    def entries(self, repo: str, commit: str) -> tuple[Entry, ...]:
        """List every file of a snapshot, by name, but links whose blob is gone. DownloadError as of ``entry``."""
        self._check_folders(repo, commit)
        root = self.snapshot(repo, commit)
        names = sorted(path.relative_to(root).as_posix() for path in _files(root))
        found = (self.entry(repo, commit, name) for name in names)
        return tuple(entry for entry in found if entry)

    def open(self, entry: Entry) -> BinaryIO:
        """Open the entry's bytes, the last step taken without following a link. DownloadError: no plain file."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            file = os.fdopen(os.open(entry.file, flags), "rb")
        except OSError as error:
            raise DownloadError(f"{entry.path} cannot be read: {error.strerror}", AGAIN) from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise DownloadError(f"{entry.path} is not a plain file: not opened", AGAIN)
        return file

    def shared_blob(self, blob: Path) -> Path | None:
        """Find the file of the store shared between repos that a blob links to; None for any other blob."""
        try:
            target = _target(blob)
        except OSError:
            return None
        store = self.folder / SHARED
        inside = next((target[len(root) + 1 :] for root in _spellings(store) if target.startswith(root + os.sep)), "")
        if not _SHARED_BLOB.fullmatch(inside.replace(os.sep, "/")):
            return None
        file = store / inside
        marker = _kind(store / SHARED_MARKER)
        marked = marker is not None and stat.S_ISREG(marker.st_mode)
        return file if marked and _is_folder(store) and _is_folder(file.parent) else None

    def files(self, repo: str, commit: str) -> tuple[Path, ...]:
        """List everything in a snapshot that is no folder, whatever it is; nothing when it lies elsewhere."""
        try:
            self._check_folders(repo, commit)
        except DownloadError:
            return ()
        return tuple(_files(self.snapshot(repo, commit)))

    def blob_of(self, repo: str, path: Path) -> Path | None:
        """Return what holds the bytes of a snapshot's entry in this repo: its blob, or a plain file itself."""
        kind = _kind(path)
        if kind is None or not stat.S_ISLNK(kind.st_mode):
            return path if kind is not None and stat.S_ISREG(kind.st_mode) else None
        blobs = self.repo_folder(repo) / "blobs"
        folder, name = os.path.split(_target(path))
        return blobs / name if name and folder in _spellings(blobs) and _is_folder(blobs) else None

    def _check_folders(self, repo: str, commit: str, parts: Sequence[str] = ()) -> None:
        """See that nothing on the way to a file, as far as it exists, is a link to another place."""
        root = self.snapshot(repo, commit)
        inside = (root.joinpath(*parts[: n + 1]) for n in range(len(parts)))
        for step in (root.parent.parent, root.parent, root, *inside):
            kind = _kind(step)
            if kind is None:
                return
            if not stat.S_ISDIR(kind.st_mode):
                raise DownloadError(f"{step} is not a folder but {_called(kind)}: not opened", AGAIN)

    def _resolved(self, repo: str, name: str, path: Path) -> Entry | None:
        kind = _kind(path)
        if kind is None:
            return None
        blob = self.blob_of(repo, path)
        if blob is None and stat.S_ISLNK(kind.st_mode):
            raise DownloadError(f"{path} is a link to {_target(path)}, not to a file of its repo: not opened", AGAIN)
        file = blob = blob or path
        kind = _kind(blob)
        if kind is not None and stat.S_ISLNK(kind.st_mode):
            shared = self.shared_blob(blob)
            if shared is None:
                raise DownloadError(f"{path} leads out of its repo through {blob}: not opened", AGAIN)
            file, kind = shared, _kind(shared)
        if kind is None:
            return None
        if not stat.S_ISREG(kind.st_mode):
            raise DownloadError(f"{path} is not a plain file but {_called(kind)}: not opened", AGAIN)
        return Entry(name, path, blob, file, kind.st_size, kind.st_mtime_ns)

    # Downloads that died

    def hub_locks(self, repo: str) -> Path:
        """Return where huggingface_hub keeps its locks, one per blob being downloaded."""
        return self.folder / ".locks" / folder_name(repo)

    def downloading(self, repo: str) -> bool:
        """Say whether some program is surely downloading into the repo, this process included."""
        return any(is_locked(Path(item.path)) is True for item in _listed(self.hub_locks(repo)))

    def orphans(self, repo: str) -> tuple[Path, ...]:
        """List the ``*.incomplete`` files that nobody is writing any more, huggingface_hub's and ours.

        A download holds its blob's lock from before the first byte to after the last: a held lock means alive, a free
        one dead once the file has been quiet for ``QUIET_S`` (some network file systems let everybody through a lock).
        Where there is no flock, ``QUIET_UNLOCKED_S`` decides alone. A file deleted under a living writer costs that
        writer a second try, never a wrong blob: the name is new for every try.
        """
        return tuple(path for path, _, rest in self._incomplete(repo) if rest <= 0)

    def parts(self, repo: str) -> dict[str, KeptPart]:
        """Find what of the orphans a pull of ours can go on with, by the blob's name: its longest part."""
        found: dict[str, KeptPart] = {}
        for path, match, rest in self._incomplete(repo):
            kind, etag = _kind(path), match["etag"]
            if rest <= 0 and match["part"] and kind and kind.st_size > found.get(etag, KeptPart(path, 0)).size:
                found[etag] = KeptPart(path, kind.st_size)
        return found

    def drop_orphans(self, repo: str, keep: Collection[str] = ()) -> int:
        """Delete the orphans, waiting up to ``QUIET_S`` for one just killed to be known as quiet.

        Args:
            keep: blobs whose longest part stays.

        Returns: the bytes freed. What cannot be deleted (read-only cache) stays.
        """
        rest = max((rest for *_, rest in self._incomplete(repo) if rest <= QUIET_S), default=0.0)
        if rest > 0:
            time.sleep(rest)
        kept = {part.path for etag, part in self.parts(repo).items() if etag in keep}
        freed = 0
        for path in set(self.orphans(repo)) - kept:
            try:
                size = os.lstat(path).st_size
                path.unlink()
            except OSError:
                continue
            freed += size
        return freed

    def _incomplete(self, repo: str) -> Iterator[tuple[Path, re.Match[str], float]]:
        """Yield partial files without a living lock, with the seconds of quiet that still make them orphans."""
        for item in _listed(self.repo_folder(repo) / "blobs"):
            match = _INCOMPLETE.fullmatch(item.name)
            kind = _kind(Path(item.path))
            if match is None or kind is None or not stat.S_ISREG(kind.st_mode):
                continue
            held = is_locked(self.hub_locks(repo) / f"{match['etag']}.lock")
            if held is True:
                continue
            age = time.time() - kind.st_mtime
            quiet = QUIET_S if held is False else QUIET_UNLOCKED_S
            # A clock behind the file server's makes files look written in the future: those are old.
            yield Path(item.path), match, quiet - age if age > -quiet else 0.0


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """List what is in a real folder, by name; nothing when it is absent, a link or unreadable."""
    return _scanned(folder) if _is_folder(folder) else []


def _scanned(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: item.name)
    except OSError:
        return []


def _leads_to_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def _files(folder: Path) -> Iterator[Path]:
    """Yield everything below that is no folder, links to folders included."""
    for item in _listed(folder):
        if item.is_dir(follow_symlinks=False):
            yield from _files(Path(item.path))
        else:
            yield Path(item.path)


def _kind(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DownloadError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error


def _is_folder(path: Path) -> bool:
    kind = _kind(path)
    return kind is not None and stat.S_ISDIR(kind.st_mode)


def _target(link: Path) -> str:
    """Return where a link points, one step, without looking at what is there."""
    text = os.readlink(link)
    return os.path.normpath(os.path.join(link.parent, text))


def _spellings(folder: Path) -> set[str]:
    """Return a folder as it was given and with the links above it followed: absolute links may use either."""
    return {os.path.abspath(folder), os.path.realpath(folder)}


def _called(kind: os.stat_result) -> str:
    names = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a pipe"}
    return names.get(stat.S_IFMT(kind.st_mode), "something else")
