"""What a pull records, and what a record that cannot be read must not cause."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.errors import DownloadError
from dflash_local.store import manifest
from tests.store.cache_trees import COMMIT, OLDER, REPO, Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.add(links=False)
    return tree


def place(tree: Tree, commit: str = COMMIT) -> Path:
    return tree.manifests / "models--lab--Pair-8B" / f"{commit}.json"


def test_what_is_written_is_read(tree: Tree) -> None:
    written = tree.record()
    assert manifest.read(tree.manifests, REPO) == written
    assert manifest.read(tree.manifests, REPO, COMMIT) == written
    assert manifest.current(tree.manifests, REPO) == COMMIT
    assert all(file.size > 0 for file in written.files)
    assert all(file.mtime_ns for file in written.files)


def test_nothing_recorded_is_no_reason_for_words(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "none"):
        assert manifest.load(folder, REPO) == (None, "")
        assert manifest.read(folder, REPO, COMMIT) is None
        assert manifest.current(folder, REPO) is None
        assert manifest.commits(folder, REPO) == ()
        manifest.forget(folder, REPO)


def test_another_commit_may_be_recorded_without_becoming_the_one_in_use(tree: Tree) -> None:
    tree.record()
    tree.add(commit=OLDER, links=False)
    tree.record(commit=OLDER, in_use=False)
    assert manifest.current(tree.manifests, REPO) == COMMIT
    assert manifest.commits(tree.manifests, REPO) == (OLDER, COMMIT)
    manifest.use(tree.manifests, REPO, OLDER)
    read = manifest.read(tree.manifests, REPO)
    assert read is not None and read.commit == OLDER
    with pytest.raises(DownloadError):
        manifest.use(tree.manifests, REPO, "main")


def bad(change: object) -> str:
    raw = {
        "version": 1,
        "repo": REPO,
        "commit": COMMIT,
        "endpoint": "https://huggingface.co",
        "pulled_at": "2026-01-02T03:04:05Z",
        "files": [{"path": "config.json", "size": 2, "sha256": None, "blob": "x", "mtime_ns": 5}],
    }
    if isinstance(change, dict):
        raw.update(change)
    return json.dumps(raw) if isinstance(change, dict) else str(change)


FILE = {"path": "config.json", "size": 2, "sha256": None, "blob": "x", "mtime_ns": 5}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bad({"version": 2}), "newer version"),
        (bad({"version": 10**30}), "newer version"),
        (bad({"version": 0}), "older or unknown layout"),
        (bad({"version": True}), "older or unknown layout"),
        (bad({"version": "1"}), "older or unknown layout"),
        ('["config.json", "model.safetensors"]', "older or unknown layout"),
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("\xff\x00", "is damaged"),
        (bad({"files": []}), "is damaged"),
        (bad({"files": None}), "is damaged"),
        (bad({"files": [5]}), "is damaged"),
        (bad({"files": [{**FILE, "size": -1}]}), "is damaged"),
        (bad({"files": [{**FILE, "size": True}]}), "is damaged"),
        (bad({"files": [{**FILE, "size": "2"}]}), "is damaged"),
        (bad({"files": [{**FILE, "path": "../../x"}]}), "is damaged"),
        (bad({"files": [{**FILE, "sha256": 5}]}), "is damaged"),
        (bad({"files": [{"path": "config.json"}]}), "is damaged"),
        (bad({"endpoint": None}), "is damaged"),
        (bad({"repo": "other/repo"}), "about something else"),
        (bad({"commit": OLDER}), "about something else"),
    ],
)
def test_a_record_that_cannot_be_read_counts_as_none_and_stays(tree: Tree, content: str, reason: str) -> None:
    tree.record()
    place(tree).write_text(content, encoding="utf-8")
    before = tree.content()
    found, why = manifest.load(tree.manifests, REPO)
    assert found is None and reason in why and REPO in why and why.endswith("not verified")
    assert manifest.read(tree.manifests, REPO) is None
    assert manifest.current(tree.manifests, REPO) == COMMIT
    assert tree.content() == before


def test_a_new_record_does_not_overwrite_one_of_a_newer_version(tree: Tree) -> None:
    written = tree.record()
    for kept, version in ((1, 7), (2, 8)):
        place(tree).write_text(json.dumps({"version": version}))
        manifest.write(tree.manifests, written)
        assert manifest.read(tree.manifests, REPO) == written
        assert json.loads(place(tree).with_name(f"{COMMIT}.json.old{kept}").read_text()) == {"version": version}
    assert manifest.commits(tree.manifests, REPO) == (COMMIT,)


def test_the_commit_in_use_outlives_its_manifest(tree: Tree) -> None:
    tree.record()
    place(tree).unlink()
    assert manifest.current(tree.manifests, REPO) == COMMIT
    assert manifest.load(tree.manifests, REPO) == (None, "")


@pytest.mark.parametrize("content", ["", "5", '{"commit": 5}', '{"repo": "lab/Pair-8B", "commit": "main"}'])
def test_a_damaged_pointer_falls_back_to_the_only_record(tree: Tree, content: str) -> None:
    tree.record()
    (place(tree).parent / manifest.POINTER).write_text(content)
    assert manifest.current(tree.manifests, REPO) == COMMIT
    tree.add(commit=OLDER, links=False)
    tree.record(commit=OLDER, in_use=False)
    assert manifest.current(tree.manifests, REPO) is None  # which of two is not guessed


def test_forgetting_takes_records_and_nothing_else(tree: Tree) -> None:
    tree.record()
    tree.add(commit=OLDER, links=False)
    tree.record(commit=OLDER, in_use=False)
    manifest.forget(tree.manifests, REPO, [OLDER])
    assert manifest.commits(tree.manifests, REPO) == (COMMIT,)
    assert manifest.current(tree.manifests, REPO) == COMMIT
    manifest.forget(tree.manifests, REPO)
    assert manifest.current(tree.manifests, REPO) is None
    assert not place(tree).parent.exists()
    assert len(tree.cache.entries(REPO, COMMIT)) == 2


def test_a_file_of_another_size_or_time_differs(tree: Tree) -> None:
    file = tree.record().files[0]
    entry = tree.cache.entry(REPO, COMMIT, file.path)
    assert entry is not None
    assert not file.differs(entry)
    assert file.differs(replace(entry, size=entry.size + 1))
    assert file.differs(replace(entry, mtime_ns=entry.mtime_ns + 1))
    assert not replace(file, mtime_ns=None).differs(replace(entry, mtime_ns=1))


def test_records_lie_in_the_data_folder(tmp_path: Path) -> None:
    assert manifest.folder_of(settings.load({"DFLASH_HOME": str(tmp_path)})) == tmp_path / "data" / "manifests"
    assert manifest.folder_of(settings.load({})) is None
