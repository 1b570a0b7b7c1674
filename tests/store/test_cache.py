"""The cache's layout, and every way in which an entry could lead out of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash_local.errors import DownloadError
from dflash_local.store.cache import Cache
from dflash_local.store.names import MAX_NAME_BYTES, folder_name, repo_of, why_unsafe
from tests.store.cache_trees import COMMIT, OLDER, REPO, SMALL, Tree

links = pytest.mark.skipif(sys.platform == "win32", reason="needs links")


def test_the_layout_is_that_of_huggingface_hub(tree: Tree) -> None:
    file_download = pytest.importorskip("huggingface_hub.file_download")
    tree.add()
    folder = tree.cache.repo_folder(REPO)
    assert folder.name == file_download.repo_folder_name(repo_id=REPO, repo_type="model")
    found = file_download.try_to_load_from_cache(REPO, "config.json", cache_dir=tree.cache.folder)
    assert found == str(tree.cache.snapshot(REPO, COMMIT) / "config.json")
    assert tree.cache.repos() == (REPO,)
    assert tree.cache.commits(REPO) == (COMMIT,)
    assert tree.cache.ref(REPO) == COMMIT
    assert tree.cache.ref(REPO, "dev") is None


def test_a_cache_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "none")
    assert cache.repos() == ()
    assert cache.commits(REPO) == ()
    assert cache.ref(REPO) is None
    assert cache.entries(REPO, COMMIT) == ()
    assert cache.entry(REPO, COMMIT, "config.json") is None
    assert cache.orphans(REPO) == ()
    assert not cache.downloading(REPO)
    assert cache.drop_orphans(REPO) == 0
    assert not (tmp_path / "none").exists()


def test_other_folders_of_the_cache_are_not_repos(tree: Tree) -> None:
    for name in ("datasets--a--b", "models--a--b--c", "models--", ".locks", "models--a--b.removing-1-00", "version"):
        (tree.cache.folder / name).mkdir(parents=True)
    (tree.cache.folder / "models--file--x").write_text("x")
    (tree.cache.folder / "models--gpt2").mkdir()
    assert tree.cache.repos() == ("gpt2",)


@pytest.mark.parametrize(
    "repo",
    [
        *("../x", "a/../b", "a/b/c", "/a", "a/", "", "a\\b", "a/b\x00", ".a/b", "a/-b", "a--b/c", "a/b.removing-1"),
        "a" * 97,
    ],
)
def test_ids_that_would_leave_the_cache_are_refused(tree: Tree, repo: str) -> None:
    with pytest.raises(DownloadError, match="is not the id of a repo") as caught:
        tree.cache.repo_folder(repo)
    assert caught.value.exit_code == 4
    assert "\x00" not in caught.value.message


def test_folder_names_and_ids_translate_both_ways() -> None:
    for repo in ("Qwen/Qwen3.5-9B", "gpt2", "a_b/c.d"):
        assert repo_of(folder_name(repo)) == repo
    assert repo_of("models--a--..") is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../../.ssh/x",
            "C:\\x",
            "C:/x",
            "\\\\h\\s",
            "a/..\\..\\b",
            "a\x00b",
            "x" * 300,
            "/etc/passwd",
            "a//b",
            "./a",
        ),
        *("", "..", "a/.", "con", "a/NUL.txt", "com1.json", "lpt¹", "a.", "a /b", "a\nb", "a?b", "a*b", "a|b", 'a"b'),
        *("a\udc80b", "/".join(["x"] * MAX_NAME_BYTES), "é" * 128),
    ],
)
def test_file_names_unsafe_on_any_system_are_refused(tree: Tree, name: str) -> None:
    assert why_unsafe(name)
    with pytest.raises(DownloadError, match="is refused: ") as caught:
        tree.cache.entry(REPO, COMMIT, name)
    assert caught.value.message.isprintable() and len(caught.value.message) < 400


@pytest.mark.parametrize("name", ["config.json", "a/b/c.safetensors", "console", "COM10", ".gitattributes", "é" * 127])
def test_ordinary_names_pass(name: str) -> None:
    assert why_unsafe(name) == ""


@pytest.mark.parametrize("commit", ["main", "a" * 39, "A" * 40, "../" + "a" * 37, ""])
def test_a_snapshot_is_named_by_a_full_commit(tree: Tree, commit: str) -> None:
    with pytest.raises(DownloadError, match="is not a commit of"):
        tree.cache.snapshot(REPO, commit)


@pytest.mark.parametrize("linked", [pytest.param(True, marks=links), False])
def test_entries_are_read_with_and_without_links(tree: Tree, linked: bool) -> None:
    tree.add({**SMALL, "original/params.json": b"{1}"}, links=linked)
    entries = tree.cache.entries(REPO, COMMIT)
    assert [(entry.name, entry.size) for entry in entries] == [
        *(("config.json", 2), ("model.safetensors", len(SMALL["model.safetensors"])), ("original/params.json", 3))
    ]
    with tree.cache.open(entries[2]) as file:
        assert file.read() == b"{1}"
    assert (entries[0].blob == entries[0].path) is not linked


@links
def test_absolute_links_to_blobs_and_a_cache_behind_a_link_are_followed(tree: Tree, tmp_path: Path) -> None:
    snapshot = tree.add()
    blob = tree.blob(b"{2}")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blob)
    (tmp_path / "elsewhere").symlink_to(tree.cache.folder)
    for folder in (tree.cache.folder, tmp_path / "elsewhere"):
        entry = Cache(folder).entry(REPO, COMMIT, "config.json")
        assert entry is not None and entry.size == 3
    assert Cache(tmp_path / "elsewhere").repos() == (REPO,)


@links
def test_an_entry_whose_blob_is_gone_is_not_there(tree: Tree) -> None:
    tree.add()
    tree.blob(SMALL["config.json"]).unlink()
    assert tree.cache.entry(REPO, COMMIT, "config.json") is None
    assert [entry.name for entry in tree.cache.entries(REPO, COMMIT)] == ["model.safetensors"]


@links
@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "../../../../secret", "../../blobs/../../../secret", "../../blobs/sub/x", "../../blobs", "../.."],
)
def test_a_link_out_of_the_repo_is_refused(tree: Tree, tmp_path: Path, target: str) -> None:
    snapshot = tree.add()
    (tmp_path / "secret").write_text("secret")
    (tree.cache.repo_folder(REPO) / "blobs" / "sub").mkdir()
    (tree.cache.repo_folder(REPO) / "blobs" / "sub" / "x").write_text("x")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(target)
    for look in (lambda: tree.cache.entry(REPO, COMMIT, "config.json"), lambda: tree.cache.entries(REPO, COMMIT)):
        with pytest.raises(DownloadError, match="config.json is a link to") as caught:
            look()
        assert caught.value.exit_code == 4 and "dflash pull" in caught.value.hint


@links
@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../../models--other--x/blobs/y", "../snapshots", "../../blobs/aa/b"]
)
def test_a_blob_that_is_a_link_elsewhere_is_refused(tree: Tree, target: str) -> None:
    tree.add()
    blob = tree.blob(SMALL["config.json"])
    blob.unlink()
    blob.symlink_to(target)
    with pytest.raises(DownloadError, match="leads out of its repo"):
        tree.cache.entry(REPO, COMMIT, "config.json")


@links
@pytest.mark.parametrize("depth", ["repo", "snapshots", "commit", "blobs", "sub"])
def test_a_folder_replaced_by_a_link_is_refused(tree: Tree, tmp_path: Path, depth: str) -> None:
    snapshot = tree.add({**SMALL, "sub/x.json": b"1"})
    repo = tree.cache.repo_folder(REPO)
    places = {"repo": repo, "snapshots": repo / "snapshots", "commit": snapshot, "blobs": repo / "blobs"}
    place = places.get(depth, snapshot / "sub")
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved", target_is_directory=True)
    with pytest.raises(DownloadError, match="not opened"):
        tree.cache.entries(REPO, COMMIT)
    with pytest.raises(DownloadError, match="not opened"):
        tree.cache.entry(REPO, COMMIT, "sub/x.json")
    if depth in ("repo", "snapshots", "commit"):
        assert tree.cache.files(REPO, COMMIT) == ()


@links
def test_a_snapshot_that_is_a_link_to_itself_is_none(tree: Tree) -> None:
    tree.add()
    (tree.cache.repo_folder(REPO) / "snapshots" / OLDER).symlink_to(OLDER)
    assert tree.cache.commits(REPO) == (COMMIT,)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_without_waiting(tree: Tree) -> None:
    snapshot = tree.add(links=False)
    (snapshot / "config.json").unlink()
    os.mkfifo(snapshot / "config.json")
    with pytest.raises(DownloadError, match="not a plain file but a pipe"):
        tree.cache.entry(REPO, COMMIT, "config.json")
    (snapshot / "tokenizer.json").mkdir()
    with pytest.raises(DownloadError, match="not a plain file but a folder"):
        tree.cache.entry(REPO, COMMIT, "tokenizer.json")


@links
def test_an_entry_swapped_after_the_check_is_not_opened(tree: Tree) -> None:
    tree.add(links=False)
    entry = tree.cache.entry(REPO, COMMIT, "config.json")
    assert entry is not None
    entry.file.unlink()
    entry.file.symlink_to("/etc/passwd")
    with pytest.raises(DownloadError, match="cannot be read"):
        tree.cache.open(entry)


@links
def test_blobs_in_the_store_shared_between_repos_are_read(tree: Tree) -> None:
    tree.add()
    stored = tree.share(SMALL["config.json"])
    entry = tree.cache.entry(REPO, COMMIT, "config.json")
    assert entry is not None and entry.file == stored and entry.size == 2
    (tree.cache.folder / "blobs" / ".huggingface-shared-blobs").unlink()
    with pytest.raises(DownloadError, match="leads out of its repo"):  # no such store: any folder of that name
        tree.cache.entry(REPO, COMMIT, "config.json")


@pytest.mark.parametrize("content", [b"", b"main", b"\xff\xfe", b"a" * 5000])
def test_a_damaged_ref_means_nothing(tree: Tree, content: bytes) -> None:
    tree.add()
    (tree.cache.repo_folder(REPO) / "refs" / "main").write_bytes(content)
    assert tree.cache.ref(REPO) is None
