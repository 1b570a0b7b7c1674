"""Files of data sets: fetched from the Hub at one commit, proven, kept, and held to what the first download found.

No code of a repository runs or is fetched: one file of a known name is, as bytes. Refuses to know what is in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from dflash_local.checkpoint_files.json_file import read_bytes
from dflash_local.errors import CheckpointError, DownloadError, SettingsError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.atomic import write_atomic
from dflash_local.store.file_transfer import FileDownload, receive
from dflash_local.store.hub import Hub, Listing
from dflash_local.store.hub_errors import NotTheFile, explained, hub_errors
from dflash_local.store.names import REPO_PREFIX, file_parts, folder_name, is_commit
from dflash_local.store.selection import refuse_hostile_names
from dflash_local.store.verify import Proof
from dflash_local.terminal import byte_size

RECORD = "datasets.json"
VERSION = 1
MAX_RECORD_BYTES = 1 << 20
ACCEPT = "--accept-new-data"
TRIES = 2


@dataclass(frozen=True, slots=True)
class DataFile:
    """Describes one file of a data set's repository as it was first found: bytes, and when (ISO 8601)."""

    repo: str
    path: str
    commit: str
    sha256: str
    bytes: int
    recorded_at: str


@dataclass(frozen=True, slots=True)
class DataStore:
    """Knows where files of data sets lie (they can be fetched again) and the record of them (kept)."""

    files: Path
    record: Path

    @classmethod
    def of(cls, settings: Settings) -> DataStore:
        """Make the user's own. SettingsError: there is no home folder."""
        if settings.cache_dir is None or settings.data_dir is None:
            raise SettingsError("there is no home folder to keep data sets in", "set HOME or DFLASH_HOME to a folder")
        return cls(settings.cache_dir / "datasets", settings.data_dir / "bench" / RECORD)

    def recorded(self, repo: str, path: str) -> DataFile | None:
        """Return what the first download of a file found; None where there was none.

        Raises:
            CheckpointError: the record cannot be read: it is never passed over, since it is what runs are held to.
        """
        entry = self._entries().get(f"{repo}/{path}")
        try:
            file = None if entry is None else DataFile(**entry)
            right = file is None or (
                (file.repo, file.path) == (repo, path) and is_commit(file.commit) and len(file.sha256) == 64
            )
        except TypeError:
            right = False
        if not right:
            hint = f"remove it, or take the newest with {ACCEPT}"
            raise CheckpointError(f"{self.record} is damaged: {repo}/{path}", hint)
        return file

    def keep(self, file: DataFile) -> None:
        """Record a file, in the place of an earlier record of it.

        Raises:
            OSError: it cannot be written. CheckpointError: see ``recorded``.
        """
        entries = {**self._entries(), f"{file.repo}/{file.path}": asdict(file)}
        write_atomic(self.record, json.dumps({"version": VERSION, "files": entries}, indent=1) + "\n")

    def place(self, repo: str, commit: str, path: str) -> Path:
        """Return where the file of a commit lies or would lie."""
        folder = "datasets--" + folder_name(repo).removeprefix(REPO_PREFIX)
        return self.files.joinpath(folder, commit, *file_parts(repo, path))

    def _entries(self) -> dict[str, Any]:
        hint = f"remove {self.record} to record what is fetched next"
        try:
            content = parse_json(read_bytes(self.record, MAX_RECORD_BYTES, hint))
        except FileNotFoundError:
            return {}
        except ValueError:
            content = None
        entries = content.get("files") if isinstance(content, dict) and content.get("version") == VERSION else None
        if not isinstance(entries, dict):
            raise CheckpointError(f"{self.record} is damaged, or of another version", hint)
        return entries


def fetch(
    hub: Hub,
    store: DataStore,
    repo: str,
    path: str,
    limit: int,
    *,
    accept_new: bool = False,
    check: Callable[[bytes], object] = lambda _raw: None,
    notify: Callable[[str], None] = lambda _text: None,
) -> tuple[DataFile, bytes]:
    """Return a file's record and its bytes, from this machine where it is here.

    Args:
        limit: the most bytes it may have.
        accept_new: take what the main branch holds now and record that instead.
        check: raises for bytes that are not the data set, before anything of them is kept or recorded.
        notify: takes a line on trouble with the connection.

    Raises:
        DownloadError: it is not what was recorded (both are named), too large, not there, offline, no network.
        CheckpointError: the record is damaged. OSError: nothing can be kept.
    """
    known = None if accept_new else store.recorded(repo, path)
    if known is None:
        listing = hub.listing(repo, None, dataset=True)
        raw = _download(hub, listing, path, limit, notify)
        check(raw)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        file = DataFile(repo, path, listing.commit, sha256(raw).hexdigest(), len(raw), now)
        write_atomic(store.place(repo, file.commit, path), raw)
        store.keep(file)
        return file, raw
    place = store.place(repo, known.commit, path)
    with suppress(FileNotFoundError):
        return known, _held(known, read_bytes(place, limit), str(place))
    raw = _held(known, _download(hub, _recorded_listing(hub, known), path, limit, notify), hub.endpoint)
    write_atomic(place, raw)
    return known, raw


def _held(known: DataFile, raw: bytes, where: str) -> bytes:
    found = sha256(raw).hexdigest()
    if found != known.sha256:
        raise DownloadError(
            f"{known.path} of {known.repo} has sha256 {found} at {where}, {known.sha256} was recorded",
            f"results would not be comparable; {ACCEPT} takes what the Hub has now",
        )
    return raw


def _recorded_listing(hub: Hub, known: DataFile) -> Listing:
    """List the recorded commit; where that is gone, raise an error that names it and the present one."""
    try:
        return hub.listing(known.repo, known.commit, dataset=True)
    except DownloadError as error:
        if hub.offline:
            raise
        try:
            now = hub.listing(known.repo, None, dataset=True).commit
        except DownloadError:
            raise error from None
        if now == known.commit:
            raise
        raise DownloadError(
            f"{known.repo} no longer has the recorded commit {known.commit}; it is at {now} now",
            f"{ACCEPT} takes that one",
        ) from error


def _download(hub: Hub, listing: Listing, path: str, limit: int, notify: Callable[[str], None]) -> bytes:
    refuse_hostile_names(listing)
    file = next((each for each in listing.files if each.path == path), None)
    if file is None:
        raise DownloadError(f"{listing.repo} has no {path} at {listing.commit}", "it was reorganised: report it")
    if file.size > limit:
        raise DownloadError(
            f"{path} of {listing.repo} has {byte_size(file.size)}, {byte_size(limit)} are allowed",
            "it is not the data set that is known: report it",
        )
    fault: NotTheFile | None = None
    url = hub.url(listing.repo, listing.commit, file, dataset=True)
    for _ in range(TRIES):
        client, pieces, proof = hub.client(), list[bytes](), Proof(file)
        try:
            with client.http:
                receive(client, FileDownload(listing.repo, listing.commit, file, url, notify=notify), pieces.append)
            raw = b"".join(pieces)
            proof.update(raw)
            proof.result()
            return raw
        except NotTheFile as error:
            fault = error
        except hub_errors() as error:
            raise explained(error, hub, listing.repo, path, listing.commit) from error
    raise DownloadError(f"{path} of {listing.repo} {fault}, twice in a row", "try again later, or check HF_ENDPOINT")
