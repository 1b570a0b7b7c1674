"""Removing what is in use, and removals that are killed or fail half-way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dflash_local.errors import BusyError, DFlashError
from dflash_local.store import local, lock, manifest, removal
from tests.store.cache_trees import HOLD, OLDER, REPO, SHARDS, Tree, only, planned, process, pulled

REMOVE_AND_DIE = """
import os, shutil, sys
from pathlib import Path
from dflash_local.store import manifest, removal
from dflash_local.store.cache import Cache
hub, manifests, locks, repo, where = sys.argv[1:]
def die(*arguments, **named):
    print("dead", flush=True)
    os._exit(9)
if where == "before forgetting":
    manifest.forget = die
else:
    rmtree = shutil.rmtree  # libraries take folders of their own away, too
    shutil.rmtree = lambda path, *more, **named: (die if ".removing-" in str(path) else rmtree)(path, *more, **named)
plan = removal.plan_removal(Cache(Path(hub)), Path(manifests), Path(locks), [repo], {})
removal.remove(plan)
"""


def test_a_repo_in_use_is_refused_with_the_process_named(tree: Tree) -> None:
    pulled(tree)
    pulled(tree, repo="lab/Drafter")
    with process(HOLD, "use", tree.locks, REPO) as session:
        before = tree.content()
        plan = planned(tree, "lab/Drafter", REPO)
        assert [item.in_use for item in plan.repos] == [(), (session.pid,)]
        with pytest.raises(BusyError, match=f"{REPO} is in use by process {session.pid}") as caught:
            removal.remove(plan)
        assert caught.value.exit_code == 1 and "quit" in caught.value.hint
        assert tree.content() == before  # nor has the drafter gone
    removal.remove(plan)
    assert tree.cache.repos() == ()


def test_a_repo_being_pulled_is_refused(tree: Tree) -> None:
    pulled(tree)
    with lock.exclusive(tree.locks, REPO), pytest.raises(BusyError, match="being pulled or removed by process"):
        removal.remove(planned(tree))
    assert tree.cache.repos() == (REPO,)


def test_a_repo_into_which_another_program_downloads_is_refused(tree: Tree) -> None:
    weak = pytest.importorskip("huggingface_hub.utils").WeakFileLock
    pulled(tree)
    with weak(tree.cache.hub_locks(REPO) / "x.lock"):
        assert only(planned(tree)).downloading
        with pytest.raises(BusyError, match="another program is downloading"):
            removal.remove(planned(tree))
    assert tree.cache.repos() == (REPO,)


@pytest.mark.parametrize("where", ["before forgetting", "while deleting"])
def test_a_removal_that_is_killed_leaves_no_half_and_is_finished_by_the_next(tree: Tree, where: str) -> None:
    pulled(tree, SHARDS)
    with process(REMOVE_AND_DIE, tree.cache.folder, tree.manifests, tree.locks, REPO, where) as child:
        assert child.wait(60) == 9
    assert tree.cache.repos() == ()
    left = local.find(tree.cache, tree.manifests, REPO)
    if where == "before forgetting":
        assert left is not None and left.missing == tuple(sorted(SHARDS))
    else:
        assert left is None
    assert len(list(tree.cache.folder.glob("*.removing-*"))) == 1
    plan = planned(tree)
    assert not only(plan).foreign and only(plan).size > 0
    assert removal.remove(plan) == only(plan).size
    assert list(tree.cache.folder.glob("models--*")) == []
    assert manifest.commits(tree.manifests, REPO) == ()


def test_leftovers_of_a_living_removal_are_not_touched(tree: Tree) -> None:
    pulled(tree)
    living = tree.cache.folder / f"models--a--b.removing-{os.getppid()}-00"
    living.mkdir()
    stray = tree.cache.folder / "models--a--b.removing-backup"
    stray.mkdir()
    assert removal.remove(planned(tree)) > 0
    assert living.exists() and stray.exists()


def test_a_rename_that_fails_puts_everything_back(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled(tree)
    pulled(tree, repo="lab/Drafter")
    tree.add(SHARDS, repo="lab/Drafter", commit=OLDER, ref="dev")  # so that it goes file by file
    before = tree.content()
    rename, count = os.rename, []

    def fail_later(source: Path, target: Path) -> None:
        count.append(source)
        if len(count) == 4:
            raise OSError(errno.EACCES, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(removal.os, "rename", fail_later)
    with pytest.raises(DFlashError, match="cannot be removed: Permission denied"):
        removal.remove(planned(tree, REPO, "lab/Drafter"))
    assert len(count) > 4
    assert tree.content() == before
    here = local.find(tree.cache, tree.manifests, REPO)
    assert here is not None and here.verified
