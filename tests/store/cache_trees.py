"""Hugging Face caches built by hand, and processes that hold locks in them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dflash_local.store import manifest, removal
from dflash_local.store.cache import Cache
from dflash_local.store.manifest import Manifest, ManifestFile
from dflash_local.store.removal import Removal, RepoRemoval

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "a" * 40
OLDER = "0123456789" * 4
REPO = "lab/Pair-8B"

HOLD = """
import sys
from pathlib import Path
from dflash_local.store import lock
mode, folder, repo = sys.argv[1:]
with lock.using(Path(folder), repo) if mode == "use" else lock.exclusive(Path(folder), repo, purpose=mode):
    print("ready", flush=True)
    sys.stdin.read()
"""


def safetensors(*names: str, fill: bytes = b"\x01") -> bytes:
    """A whole file whose tensors are two bytes each."""
    header = {
        name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * at, 2 * at + 2]} for at, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + fill * (2 * len(names))


SMALL = {"config.json": b"{}", "model.safetensors": safetensors("a", "b")}
SHARDS = {
    "config.json": b"{}",
    "model-1.safetensors": safetensors("a"),
    "model-2.safetensors": safetensors("b"),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
}


class Tree:
    """A cache that tests fill as huggingface_hub would."""

    def __init__(self, folder: Path) -> None:
        self.cache = Cache(folder / "hub")
        self.manifests = folder / "manifests"
        self.locks = folder / "locks"

    def add(
        self,
        files: Mapping[str, bytes] = SMALL,
        repo: str = REPO,
        commit: str = COMMIT,
        ref: str | None = "main",
        links: bool = True,
    ) -> Path:
        """A snapshot with these files: links to blobs, or the files themselves."""
        snapshot = self.cache.snapshot(repo, commit)
        for name, data in files.items():
            path = snapshot / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not links:
                path.write_bytes(data)
                continue
            blob = self.blob(data, repo)
            path.symlink_to(os.path.relpath(blob, path.parent))
        if ref is not None:
            path = self.cache.repo_folder(repo) / "refs" / ref
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)
        return snapshot

    def blob(self, data: bytes, repo: str = REPO) -> Path:
        path = self.cache.repo_folder(repo) / "blobs" / hashlib.sha256(data).hexdigest()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def share(self, data: bytes, repo: str = REPO) -> Path:
        """A blob as a link into the store that huggingface_hub shares between repos."""
        digest = hashlib.sha256(data + b"xet").hexdigest()
        store = self.cache.folder / "blobs"
        (store / digest[:2]).mkdir(parents=True, exist_ok=True)
        (store / ".huggingface-shared-blobs").write_text("1\n")
        (store / digest[:2] / digest).write_bytes(data)
        blob = self.cache.repo_folder(repo) / "blobs" / hashlib.sha256(data).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.unlink(missing_ok=True)
        blob.symlink_to(f"../../blobs/{digest[:2]}/{digest}")
        with (store / digest[:2] / f"{digest}.refs").open("a") as file:
            file.write(blob.relative_to(self.cache.folder).as_posix() + "\n")
        return store / digest[:2] / digest

    def record(self, repo: str = REPO, commit: str = COMMIT, in_use: bool = True) -> Manifest:
        """The manifest a pull of what is there would leave."""
        files = []
        for entry in self.cache.entries(repo, commit):
            digest = hashlib.sha256(entry.file.read_bytes()).hexdigest()
            files.append(ManifestFile(entry.name, entry.size, digest, entry.blob.name, entry.mtime_ns))
        written = Manifest(repo, commit, "https://huggingface.co", tuple(files), "2026-01-02T03:04:05Z")
        manifest.write(self.manifests, written, in_use)
        return written

    def content(self) -> dict[str, bytes]:
        """Every file of cache and manifests, to see that nothing was deleted or rewritten."""
        roots = (self.cache.folder, self.manifests)
        return {str(path): path.read_bytes() for root in roots for path in sorted(root.rglob("*")) if path.is_file()}


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python that runs ``code`` with ``sys.argv[1:]``; it is ready once it has printed a line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stderr is not None
    try:
        if not child.stdout.readline():
            raise AssertionError(child.stderr.read())
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()


def gone_pid() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def planned(tree: Tree, *repos: str, keep: Mapping[str, tuple[str, ...]] | None = None) -> Removal:
    """What removing would do; of the tree's usual repo when none is named."""
    return removal.plan_removal(tree.cache, tree.manifests, tree.locks, repos or (REPO,), keep or {})


def only(plan: Removal) -> RepoRemoval:
    assert len(plan.repos) == 1
    return plan.repos[0]


def pulled(tree: Tree, files: Mapping[str, bytes] = SMALL, links: bool = True, repo: str = REPO) -> None:
    """A repo as our own pull leaves it."""
    tree.add(files, links=links, repo=repo)
    tree.record(repo)
    (tree.cache.hub_locks(repo)).mkdir(parents=True)
    (tree.cache.hub_locks(repo) / "x.lock").touch()
