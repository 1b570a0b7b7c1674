"""The Hub: where it is, who we are to it, and what a repository holds at a commit, by one request per listing."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dflash_local.errors import DownloadError, SettingsError
from dflash_local.json_text import parse_json
from dflash_local.settings import Settings
from dflash_local.store.hub_client import HubClient, HubPatience
from dflash_local.store.hub_errors import explained, hub_errors, refusal
from dflash_local.store.names import folder_name, is_commit

MAX_FILE_BYTES = 1 << 50
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Describes a file of a commit: its size in bytes, sha256 (only of LFS files) and git blob id."""

    path: str
    size: int
    sha256: str | None
    blob: str

    @property
    def etag(self) -> str:
        """Return the name of its blob in the cache."""
        return self.sha256 or self.blob


@dataclass(frozen=True, slots=True)
class Listing:
    """Lists what a repository holds at one commit. ``gated``: its owner requires agreement to a licence."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    gated: bool


@dataclass(frozen=True, slots=True)
class Hub:
    """Stands for one endpoint, with the user's token and the cache folder that belongs to it.

    Attributes:
        offline: no socket may be opened.
        xet: weights come over huggingface_hub's Xet client, which makes its own connections: list of hosts, patience
            and resuming do not reach them. Every byte is proven all the same.
    """

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    cache: Path
    patience: HubPatience = HubPatience()
    xet: bool = False

    @classmethod
    def of(cls, settings: Settings, xet: bool = False) -> Hub:
        """Make the Hub of the user's variables. SettingsError: no home folder for models, or no Xet client."""
        known = settings.hub
        if known.cache is None:
            raise SettingsError("there is no home folder to keep models in", "set HF_HOME or HF_HUB_CACHE to a folder")
        if xet and find_spec("hf_xet") is None:
            raise SettingsError("the Xet client is not installed", "pip install hf_xet, or pull without --xet")
        return cls(known.endpoint, known.token, known.offline, known.cache, xet=xet)

    def client(self, stopped: threading.Event | None = None) -> HubClient:
        """Make an HTTP client for the endpoint, for one thread."""
        return HubClient(self, stopped)

    def url(self, repo: str, commit: str, file: RemoteFile, dataset: bool = False) -> str:
        from huggingface_hub import hf_hub_url

        kind = "dataset" if dataset else "model"
        return hf_hub_url(repo, file.path, repo_type=kind, revision=commit, endpoint=self.endpoint)

    def listing(self, repo: str, revision: str | None, dataset: bool = False) -> Listing:
        """Look up the commit that ``revision`` (a commit, branch or tag; None: the main branch) means, and its files.

        Args:
            dataset: of a data set's repository, not of a model's.

        Raises:
            DownloadError: offline, not found, no access, no network, or an answer that makes no sense.
        """
        folder_name(repo)  # refuses what is no id
        if self.offline:
            raise DownloadError(f"{repo} cannot be looked up: offline mode is on", "unset HF_HUB_OFFLINE")
        # Not by huggingface_hub's own call: its client is the whole process's, and reads without a bound.
        kind, at = "datasets" if dataset else "models", f"/revision/{quote(revision, safe='')}" if revision else ""
        try:
            with self.client().http as http:
                answer = http.get(f"{self.endpoint}/api/{kind}/{repo}{at}", params={"blobs": True})
        except hub_errors() as error:
            raise explained(error, self, repo, revision=revision) from error
        if answer.status_code != 200:
            raise refusal(answer, self, repo, revision=revision)
        try:
            found = parse_json(answer.content)
            commit, is_gated = found["sha"], bool(found.get("gated"))
            files = tuple(_remote_file(each, repo, self.endpoint) for each in found["siblings"])
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # no JSON, or of another shape
            message = f"{self.endpoint} answered for {repo} with something else than a listing"
            raise DownloadError(message, "check HF_ENDPOINT") from error
        if not isinstance(commit, str) or not is_commit(commit) or (is_commit(revision) and commit != revision):
            message = f"{self.endpoint} answered for {repo} with a wrong commit, {str(commit)[:60]!r}"
            raise DownloadError(message, "try again later")
        return Listing(repo, commit, files, is_gated)


def _remote_file(sibling: Any, repo: str, endpoint: str) -> RemoteFile:
    name, size, blob, lfs = (sibling.get(key) for key in ("rfilename", "size", "blobId", "lfs"))
    sha256 = None if lfs is None else lfs.get("sha256")
    named = isinstance(name, str) and isinstance(blob, str) and _GIT_SHA1.fullmatch(blob)
    sized = isinstance(size, int) and 0 <= size <= MAX_FILE_BYTES
    if not named or not sized or not (lfs is None or (isinstance(sha256, str) and _SHA256.fullmatch(sha256))):
        hint = "without them nothing can be verified: use another mirror, or unset HF_ENDPOINT"
        raise DownloadError(f"{endpoint} does not tell size and checksum of {ascii(name)[:100]} in {repo}", hint)
    return RemoteFile(name, size, sha256, blob)
