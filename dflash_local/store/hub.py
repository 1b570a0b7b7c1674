"""The Hub: where it is, who we are to it, and what a repository holds at a commit, by one request per listing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_local.errors import DownloadError, SettingsError
from dflash_local.settings import Settings
from dflash_local.store.errors_of_hub import hub_errors, of_hub_error
from dflash_local.store.http_client import HubClient, Patience
from dflash_local.store.names import folder_name, is_commit

MAX_FILE_BYTES = 1 << 50
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit: its size in bytes, sha256 (only of LFS files) and git blob id."""

    path: str
    size: int
    sha256: str | None
    blob: str

    @property
    def etag(self) -> str:
        """The name of its blob in the cache."""
        return self.sha256 or self.blob


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit. ``gated``: its owner requires agreement to a licence."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    gated: bool


@dataclass(frozen=True, slots=True)
class Hub:
    """One endpoint, with the user's token and the cache folder that belongs to it.

    Attributes:
        offline: no socket may be opened. hosts: further hosts that may send the files.
        xet: weights come over huggingface_hub's Xet client, which makes its own connections: list of hosts, patience,
            resuming and the quick end do not reach them. Every byte is proven all the same.
    """

    endpoint: str
    token: str | None = field(repr=False)
    offline: bool
    cache: Path
    hosts: tuple[str, ...] = ()
    patience: Patience = Patience()
    xet: bool = False

    @classmethod
    def of(cls, settings: Settings, xet: bool = False) -> Hub:
        """The Hub that the user's variables describe. SettingsError: no home folder for models, or no Xet client."""
        known = settings.hub
        if known.cache is None:
            raise SettingsError("there is no home folder to keep models in", "set HF_HOME or HF_HUB_CACHE to a folder")
        if xet and find_spec("hf_xet") is None:
            raise SettingsError("the Xet client is not installed", "pip install hf_xet, or pull without --xet")
        return cls(known.endpoint, known.token, known.offline, known.cache, xet=xet)

    def client(self) -> HubClient:
        """A new connection policy for this endpoint; put it in use around anything that may reach the network."""
        return HubClient(self.endpoint, self.hosts, self.patience, self.xet)

    def listing(self, repo: str, revision: str | None, dataset: bool = False) -> Listing:
        """The commit that ``revision`` (a commit, branch or tag; None: the main branch) stands for, and its files.

        Args:
            dataset: of a data set's repository, not of a model's.

        Raises:
            DownloadError: offline, not found, no access, no network, or an answer that makes no sense.
        """
        folder_name(repo)  # refuses what is no id
        if self.offline:
            raise DownloadError(f"{repo} cannot be looked up: offline mode is on", "unset HF_HUB_OFFLINE")
        import huggingface_hub

        # False, not None: huggingface_hub would look for a token of its own.
        api = huggingface_hub.HfApi(endpoint=self.endpoint, token=self.token or False, library_name="dflash-local")
        try:
            with self.client().in_use():
                look_up = api.dataset_info if dataset else api.model_info
                info = look_up(repo, revision=revision, files_metadata=True)
        except hub_errors() as error:
            raise of_hub_error(error, repo, self.endpoint, bool(self.token), revision=revision) from error
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # over JSON of another shape
            message = f"{self.endpoint} answered for {repo} with something else"
            raise DownloadError(message, "check HF_ENDPOINT") from error
        commit = info.sha
        if not isinstance(commit, str) or not is_commit(commit) or (is_commit(revision) and commit != revision):
            message = f"{self.endpoint} answered for {repo} with a wrong commit, {str(commit)[:60]!r}"
            raise DownloadError(message, "try again later")
        files = tuple(_remote_file(sibling, repo, self.endpoint) for sibling in info.siblings or ())
        return Listing(repo, commit, files, bool(info.gated))


def _remote_file(sibling: Any, repo: str, endpoint: str) -> RemoteFile:
    size, blob, lfs = sibling.size, sibling.blob_id, sibling.lfs
    sha256 = getattr(lfs, "sha256", None)
    named = isinstance(sibling.rfilename, str) and isinstance(blob, str) and _GIT_SHA1.fullmatch(blob)
    sized = isinstance(size, int) and 0 <= size <= MAX_FILE_BYTES
    if not named or not sized or not (lfs is None or (isinstance(sha256, str) and _SHA256.fullmatch(sha256))):
        name = ascii(sibling.rfilename)[:100]
        hint = "without them nothing can be verified: use another mirror, or unset HF_ENDPOINT"
        raise DownloadError(f"{endpoint} does not tell size and checksum of {name} in {repo}", hint)
    return RemoteFile(sibling.rfilename, size, sha256, blob)
