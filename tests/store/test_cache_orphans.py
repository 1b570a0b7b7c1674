"""Partial files of downloads: which are dead, which only look so; and a cache nobody can write."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

import pytest

from dflash_local.store import cache as cache_module
from tests.store.cache_trees import COMMIT, REPO, Tree

links = pytest.mark.skipif(sys.platform == "win32", reason="needs links")


def partial(tree: Tree, name: str = "e" * 64 + ".0123abcd.incomplete", age: float = 60.0) -> Path:
    path = tree.cache.repo_folder(REPO) / "blobs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 100)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_partial_files_of_dead_downloads_are_found_and_deleted(tree: Tree) -> None:
    tree.add()
    dead = [partial(tree), partial(tree, "e" * 40 + ".incomplete")]
    assert tree.cache.orphans(REPO) == tuple(sorted(dead))
    assert tree.cache.drop_orphans(REPO) == 200
    assert not any(path.exists() for path in dead)
    assert len(tree.cache.entries(REPO, COMMIT)) == 2


@links
def test_a_partial_file_whose_lock_huggingface_hub_holds_is_left_alone(tree: Tree) -> None:
    fixes = pytest.importorskip("huggingface_hub.utils")
    lock = tree.cache.hub_locks(REPO) / f"{'e' * 64}.lock"
    lock.parent.mkdir(parents=True)
    path = partial(tree, age=3600.0)
    with fixes.WeakFileLock(lock):
        assert tree.cache.orphans(REPO) == ()
        assert tree.cache.drop_orphans(REPO) == 0 and path.exists() and tree.cache.downloading(REPO)
    lock.touch()  # as a process that was killed leaves it
    assert tree.cache.orphans(REPO) == (path,) and not tree.cache.downloading(REPO)
    assert lock.exists()


def test_a_file_just_written_is_awaited_then_deleted(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "QUIET_S", 0.2)
    path = partial(tree, age=0.0)
    assert tree.cache.orphans(REPO) == ()
    assert tree.cache.drop_orphans(REPO) == 100
    assert not path.exists()


def test_a_file_that_goes_on_growing_is_left_alone(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "QUIET_S", 0.2)
    path = partial(tree, age=0.0)
    # Another machine's writer, whose lock does not reach this one, writes while we wait.
    monkeypatch.setattr(cache_module.time, "sleep", lambda seconds: os.utime(path))
    assert tree.cache.drop_orphans(REPO) == 0
    assert path.exists()


def test_without_flock_only_age_decides(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "is_locked", lambda path: None)
    young, old = partial(tree, age=60.0), partial(tree, "f" * 64 + ".0123abcd.incomplete", age=3600.0)
    assert tree.cache.orphans(REPO) == (old,)
    assert tree.cache.drop_orphans(REPO) == 100 and young.exists()


def test_a_partial_file_dated_in_the_future_is_old(tree: Tree) -> None:
    path = partial(tree, age=-3600.0)
    assert tree.cache.orphans(REPO) == (path,)


@links
def test_links_that_pose_as_partial_files_are_not_touched(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    tree.add()
    link = tree.cache.repo_folder(REPO) / "blobs" / "x.incomplete"
    link.symlink_to(tmp_path / "precious")
    assert tree.cache.drop_orphans(REPO) == 0
    assert (tmp_path / "precious").exists() and link.is_symlink()


@links
def test_a_read_only_cache_is_read(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.add()
    partial(tree)

    def refuse(path: object, *rest: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    opened = os.open

    def read_only(path: Path, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(Path, "unlink", refuse)
    for name in ("mkdir", "rename", "replace", "unlink", "symlink", "remove"):
        monkeypatch.setattr(os, name, refuse)
    assert len(tree.cache.entries(REPO, COMMIT)) == 2
    assert tree.cache.ref(REPO) == COMMIT
    assert len(tree.cache.orphans(REPO)) == 1
    assert tree.cache.drop_orphans(REPO) == 0  # it cannot, and that is no failure
