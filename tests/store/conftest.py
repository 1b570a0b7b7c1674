"""A fake hub, a cache of its own, and a pull that loses patience within a second."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local.catalog.row import Fingerprint
from dflash_local.events import Notice, PullProgress
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub
from dflash_local.store.hub_client import HubPatience
from dflash_local.store.local import Local
from dflash_local.store.pull import PullPlan, Wanted, prepare, pull
from tests.fake_hub import FakeHub, safetensors, shards
from tests.store.cache_trees import Tree

QUICK = HubPatience(
    connect_s=1.0,
    answer_s=1.0,
    stall_s=0.15,
    whole_s=5.0,
    tries=3,
    first_tries=3,
    progress=1 << 16,
    pause_s=0.01,
    longest_wait_s=2.0,
)
TOKEN = "hf_secretsecretsecret"
TARGET, DRAFTER = "owner/target", "owner/drafter"
KNOWN = Fingerprint("first", 2, (1, 3), 9, 8, None)
PAIR = (Wanted("target", TARGET), Wanted("drafter", DRAFTER, None, (KNOWN,)))
DRAFTER_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 9},
}


@dataclass
class Puller:
    """Pulls from the fake hub into a cache below one folder, and keeps what was said."""

    fake: FakeHub
    home: Path
    token: str | None = None
    offline: bool = False
    patience: HubPatience = QUICK
    xet: bool = False
    said: list[Any] = field(default_factory=list)

    @property
    def hub(self) -> Hub:
        return Hub(self.fake.url, self.token, self.offline, self.home / "hub", self.patience, self.xet)

    @property
    def cache(self) -> Cache:
        return Cache(self.home / "hub")

    @property
    def manifests(self) -> Path:
        return self.home / "manifests"

    @property
    def locks(self) -> Path:
        return self.home / "locks"

    def prepare(self, *wanted: Wanted | str, update: bool = False) -> PullPlan:
        asked = [Wanted("target", item) if isinstance(item, str) else item for item in wanted or (TARGET,)]
        return prepare(asked, self.hub, self.cache, self.manifests, update=update)

    def run(self, plan: PullPlan, **options: Any) -> tuple[Local, ...]:
        options.setdefault("on_event", self.said.append)
        return pull(plan, self.hub, self.cache, self.manifests, self.locks, **options)

    def pull(self, *wanted: Wanted | str, update: bool = False, **options: Any) -> tuple[Local, ...]:
        return self.run(self.prepare(*wanted, update=update), **options)

    def impatient(self, **changes: Any) -> None:
        self.patience = replace(self.patience, **changes)

    def age(self) -> list[Path]:
        """Parts that a run left, as of a minute ago: the next run would wait whether they grow."""
        parts = [*self.cache.folder.rglob("*.incomplete")]
        for part in parts:
            os.utime(part, (time.time() - 60, time.time() - 60))
        return parts

    @property
    def notices(self) -> list[str]:
        return [event.message for event in self.said if isinstance(event, Notice)]

    @property
    def progress(self) -> list[PullProgress]:
        return [event for event in self.said if isinstance(event, PullProgress)]

    def blobs(self, repo: str = TARGET) -> list[str]:
        folder = self.cache.repo_folder(repo) / "blobs"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def names(self, repo: str = TARGET) -> list[str]:
        """The files of every snapshot."""
        return [entry.name for commit in self.cache.commits(repo) for entry in self.cache.entries(repo, commit)]

    def incomplete(self, repo: str = TARGET) -> list[str]:
        return [name for name in self.blobs(repo) if name.endswith(".incomplete")]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture
def puller(fake: FakeHub, tmp_path: Path) -> Puller:
    return Puller(fake, tmp_path)


@pytest.fixture
def small(fake: FakeHub) -> dict[str, bytes]:
    """A target in one file of 200 kB, at the hub."""
    files = {
        "config.json": b'{"model_type": "qwen3"}',
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors(200_000),
    }
    fake.add_repo(TARGET, files)
    return files


@pytest.fixture
def sharded(fake: FakeHub) -> dict[str, bytes]:
    """A target in five shards, at the hub."""
    files = {"config.json": b'{"model_type": "qwen3"}', "tokenizer.json": b"{}", **shards(5, 50_000)}
    fake.add_repo(TARGET, files)
    return files


@pytest.fixture
def pair(fake: FakeHub, small: dict[str, bytes]) -> tuple[str, str]:
    """The small target and a drafter for it, at the hub."""
    config = json.dumps(DRAFTER_CONFIG).encode()
    fake.add_repo(DRAFTER, {"config.json": config, "model.safetensors": safetensors(100_000, 7)})
    return TARGET, DRAFTER


@pytest.fixture
def secret() -> str:
    """A token that must not appear anywhere."""
    return TOKEN


@pytest.fixture
def failing() -> Callable[[int], Callable[..., Any]]:
    """A factory of functions that raise OSError with a given number."""

    def of(number: int) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        return fail

    return of
