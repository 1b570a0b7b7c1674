"""Removing a pair: what goes, what stays because somebody else needs it, and never a half of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dflash_local.store import local, manifest, removal
from tests.store.cache_trees import COMMIT, OLDER, REPO, SHARDS, SMALL, Tree, only, planned, pulled, safetensors


@pytest.mark.parametrize("linked", [True, False])
def test_what_we_pulled_goes_altogether(tree: Tree, linked: bool) -> None:
    pulled(tree, SHARDS, linked)
    (tree.cache.repo_folder(REPO) / ".no_exist" / COMMIT).mkdir(parents=True)
    plan = planned(tree)
    item = only(plan)
    bytes_of_files = sum(len(data) for data in ({*SHARDS.values()} if linked else SHARDS.values()))
    assert item.size == item.whole_size == bytes_of_files + len(COMMIT)
    assert (item.commits, item.foreign, item.others, item.shared_with) == ((COMMIT,), False, (), ())
    assert tree.cache.repo_folder(REPO).exists()  # planning is not doing
    assert removal.remove(plan) == item.size
    assert [path.name for path in tree.cache.folder.iterdir()] == [".locks"]
    assert list((tree.cache.folder / ".locks").iterdir()) == []
    assert manifest.commits(tree.manifests, REPO) == ()
    assert local.find(tree.cache, tree.manifests, REPO) is None
    assert planned(tree).repos == ()


def test_a_repo_that_is_not_here_is_left_out(tree: Tree) -> None:
    plan = planned(tree, "a/b", "a/c")
    assert plan.repos == ()
    assert removal.remove(plan) == 0
    assert not tree.cache.folder.exists()


@pytest.mark.parametrize("linked", [True, False])
def test_of_a_repo_that_another_program_uses_too_only_ours_goes(tree: Tree, linked: bool) -> None:
    pulled(tree, {**SMALL, "tokenizer.json": b"ours"}, linked)
    # The same weights in another commit, and a file of our commit that we did not fetch.
    tree.add({**SMALL, "tokenizer.json": b"theirs"}, commit=OLDER, ref="dev", links=linked)
    tree.add({"README.md": b"theirs too"}, links=linked, ref=None)
    folder = tree.cache.repo_folder(REPO)
    theirs = {path: path.read_bytes() for path in tree.cache.files(REPO, OLDER)}
    plan = planned(tree)
    item = only(plan)
    assert not item.foreign
    assert set(item.others) == {OLDER, "aaaaaaaa/README.md"}
    expected = len(b"ours") if linked else len(b"ours") + sum(map(len, SMALL.values()))
    assert item.size == expected < item.whole_size
    assert removal.remove(plan) == expected
    assert {path: path.read_bytes() for path in tree.cache.files(REPO, OLDER)} == theirs
    assert [path.name for path in tree.cache.files(REPO, COMMIT)] == ["README.md"]
    assert sorted(path.name for path in (folder / "refs").iterdir()) == ["dev", "main"]  # README.md is still there
    assert manifest.commits(tree.manifests, REPO) == ()
    assert tree.cache.hub_locks(REPO).exists()


def test_with_our_commit_go_the_notes_about_it_alone(tree: Tree) -> None:
    pulled(tree)
    tree.add(SHARDS, commit=OLDER, ref="dev")
    folder = tree.cache.repo_folder(REPO)
    for commit in (COMMIT, OLDER):
        (folder / "trees").mkdir(exist_ok=True)
        (folder / "trees" / f"{commit}.json").write_text("{}")
        (folder / ".no_exist" / commit).mkdir(parents=True)
    removal.remove(planned(tree))
    assert tree.cache.commits(REPO) == (OLDER,)
    for place in ("trees", ".no_exist", "snapshots"):
        assert [path.name.removesuffix(".json") for path in (folder / place).iterdir()] == [OLDER]
    assert [path.name for path in (folder / "refs").iterdir()] == ["dev"]
    hub = pytest.importorskip("huggingface_hub").scan_cache_dir(tree.cache.folder)
    assert not hub.warnings and [repo.repo_id for repo in hub.repos] == [REPO]


def test_a_commit_that_came_after_planning_is_not_ours(tree: Tree) -> None:
    pulled(tree)
    plan = planned(tree)
    tree.add(SHARDS, commit=OLDER, ref="dev")
    removal.remove(plan)
    assert tree.cache.commits(REPO) == (OLDER,)


def test_a_record_of_a_newer_version_still_says_that_the_repo_is_ours(tree: Tree) -> None:
    pulled(tree)
    (tree.manifests / "models--lab--Pair-8B" / f"{COMMIT}.json").write_text('{"version": 9}')
    item = only(planned(tree))
    assert not item.foreign and item.others == () and item.commits == (COMMIT,)


def test_a_repo_that_is_a_link_loses_the_link_alone(tree: Tree, tmp_path: Path) -> None:
    pulled(tree)
    folder = tree.cache.repo_folder(REPO)
    folder.rename(tmp_path / "disk")
    folder.symlink_to(tmp_path / "disk", target_is_directory=True)
    removal.remove(planned(tree))
    assert not folder.is_symlink() and (tmp_path / "disk" / "snapshots" / COMMIT / "config.json").exists()


def test_links_out_of_a_repo_are_deleted_not_followed(tree: Tree, tmp_path: Path) -> None:
    pulled(tree)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (tree.cache.snapshot(REPO, COMMIT) / "folder").symlink_to(tmp_path / "precious")
    (tree.cache.repo_folder(REPO) / "blobs" / "elsewhere").symlink_to(tmp_path / "precious" / "file")
    removal.remove(planned(tree), whole=True)
    assert tree.cache.repos() == ()
    assert (tmp_path / "precious" / "file").read_text() == "x"


def test_a_snapshots_folder_that_lies_elsewhere_is_not_emptied(tree: Tree, tmp_path: Path) -> None:
    pulled(tree)
    tree.add(SHARDS, commit=OLDER, ref=None)
    place = tree.cache.repo_folder(REPO) / "snapshots"
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved", target_is_directory=True)
    before = sorted((tmp_path / "moved").rglob("*"))
    removal.remove(planned(tree))
    assert sorted((tmp_path / "moved").rglob("*")) == before


def test_shared_blobs_go_with_their_last_repo(tree: Tree) -> None:
    strategy = pytest.importorskip("huggingface_hub").DeleteCacheStrategy
    if "cache_dir" not in {field.name for field in fields(strategy)}:
        pytest.skip("this huggingface_hub shares no blobs between repos")
    weights = safetensors("a", "b", fill=b"\x07") * 50
    for repo in (REPO, "lab/Twin"):
        tree.add({**SMALL, "model.safetensors": weights}, repo=repo)
        stored = tree.share(weights, repo)
        tree.record(repo)
    small = len(SMALL["config.json"]) + len(COMMIT)
    assert only(planned(tree)).size == small  # the twin needs the weights
    assert removal.remove(planned(tree)) == small
    assert stored.read_bytes() == weights
    twin = planned(tree, "lab/Twin")
    assert removal.remove(twin) == len(weights) + small
    assert not stored.exists()


def test_bytes_that_another_folder_has_too_are_not_freed(tree: Tree, tmp_path: Path) -> None:
    pulled(tree)
    whole, entry = only(planned(tree)).size, tree.cache.entry(REPO, COMMIT, "config.json")
    assert entry is not None and entry.size
    (tmp_path / "copy").hardlink_to(entry.file)
    plan = planned(tree)
    assert only(plan).size == removal.remove(plan) == whole - entry.size


def test_a_repo_gone_by_other_hands_leaves_only_our_record_to_forget(tree: Tree) -> None:
    tree.add()
    tree.record()
    tree.cache.repo_folder(REPO).rename(tree.cache.folder / "models--moved--away")
    item = only(planned(tree))
    assert item.size == 0 and not item.foreign
    assert removal.remove(planned(tree)) == 0
    assert manifest.commits(tree.manifests, REPO) == ()
    assert tree.cache.repos() == ("moved/away",)
