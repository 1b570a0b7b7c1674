"""Files of data sets from a fake hub: recorded once, held to it, refused when they are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_local.errors import CheckpointError, DownloadError
from dflash_local.store.datasets import DataFile, DataStore, fetch
from dflash_local.store.hub import Hub
from tests.fake_hub import FakeHub, online
from tests.store.conftest import QUICK

REPO, FILE, LIMIT = "owner/data", "test.jsonl", 1 << 20
RAW = b'{"question": "a"}\n' * 100


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake, online():
        fake.add_repo(REPO, {FILE: RAW, "data.py": b"raise SystemExit"})
        yield fake


@pytest.fixture
def store(tmp_path: Path) -> DataStore:
    return DataStore(tmp_path / "files", tmp_path / "bench" / "datasets.json")


def get(
    fake: FakeHub, store: DataStore, path: str = FILE, offline: bool = False, **more: Any
) -> tuple[DataFile, bytes]:
    hub = Hub(fake.url, None, offline, store.files / "unused", QUICK)
    return fetch(hub, store, REPO, path, more.pop("limit", LIMIT), **more)


def test_the_first_download_is_recorded_and_the_next_run_needs_nobody(hub: FakeHub, store: DataStore) -> None:
    file, raw = get(hub, store)
    assert raw == RAW and file.bytes == len(RAW) and file.commit == hub.repos[REPO].refs["main"]
    assert json.loads(store.record.read_text(encoding="utf-8"))["files"][f"{REPO}/{FILE}"]["sha256"] == file.sha256
    asked = len(hub.requests)
    assert get(hub, store, offline=True) == (file, raw) and len(hub.requests) == asked
    assert {request.file for request in hub.gets()} == {FILE}, "one file and no code"


def test_a_newer_commit_changes_nothing_until_it_is_accepted(hub: FakeHub, store: DataStore) -> None:
    first, _ = get(hub, store)
    second = hub.add_repo(REPO, {FILE: b"{}\n"})
    assert get(hub, store) == (first, RAW)
    store.place(REPO, first.commit, FILE).unlink()
    assert get(hub, store) == (first, RAW), "fetched again at the recorded commit"
    file, raw = get(hub, store, accept_new=True)
    assert (file.commit, raw) == (second, b"{}\n") and store.recorded(REPO, FILE) == file


def test_other_bytes_here_are_an_error_that_names_both(hub: FakeHub, store: DataStore) -> None:
    file, _ = get(hub, store)
    store.place(REPO, file.commit, FILE).write_bytes(b"changed")
    with pytest.raises(DownloadError, match=rf"has sha256 \w+ at .*, {file.sha256} was recorded") as refused:
        get(hub, store)
    assert "--accept-new-data" in refused.value.hint


def test_a_commit_that_is_gone_is_named_beside_the_present_one(hub: FakeHub, store: DataStore) -> None:
    file, _ = get(hub, store)
    store.place(REPO, file.commit, FILE).unlink()
    now = hub.add_repo(REPO, {FILE: b"{}\n"})
    hub.drop_commit(REPO, file.commit)
    with pytest.raises(DownloadError, match=f"{file.commit}; it is at {now} now"):
        get(hub, store)


def test_a_mirror_with_other_bytes_of_the_commit_is_refused(hub: FakeHub, store: DataStore) -> None:
    file, _ = get(hub, store)
    store.place(REPO, file.commit, FILE).unlink()
    changed = FakeHub()
    with changed as mirror:
        mirror.add_repo(REPO, {FILE: b"{}\n"})
        repo = mirror.repos[REPO]
        repo.commits = {file.commit: next(iter(repo.commits.values()))}
        repo.refs = {"main": file.commit}
        with pytest.raises(DownloadError, match=f"{file.sha256} was recorded"):
            get(mirror, store)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a\\..\\b", "a\x1bb", "C:evil"])
def test_hostile_names_are_refused(hub: FakeHub, store: DataStore, name: str) -> None:
    hub.add_repo(REPO, {FILE: RAW, name: b"x"})
    with pytest.raises(DownloadError, match="which is refused"):
        get(hub, store)
    assert not store.files.exists() and not hub.gets()


def test_bombs_are_refused_before_and_while_they_come(hub: FakeHub, store: DataStore) -> None:
    with pytest.raises(DownloadError, match="are allowed"):
        get(hub, store, limit=10)
    hub.fault(FILE, "chunked", times=9, extra=1 << 20)
    with pytest.raises(DownloadError, match="more than the 1,800 bytes"):
        get(hub, store)
    assert not store.files.exists()


def test_damaged_bytes_are_not_taken(hub: FakeHub, store: DataStore) -> None:
    hub.fault(FILE, "corrupt", times=9)
    with pytest.raises(DownloadError, match="twice in a row"):
        get(hub, store)
    hub.clear_faults()
    hub.fault(FILE, "corrupt", times=1)
    assert get(hub, store)[1] == RAW, "a second try"


def test_what_is_missing_is_named(hub: FakeHub, store: DataStore) -> None:
    with pytest.raises(DownloadError, match=r"has no other\.jsonl at"):
        get(hub, store, "other.jsonl")
    with pytest.raises(DownloadError, match="offline mode is on"):
        get(hub, store, offline=True)


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 2}', "[" * 100_000])
def test_a_damaged_record_is_never_passed_over(hub: FakeHub, store: DataStore, content: str) -> None:
    store.record.parent.mkdir(parents=True)
    store.record.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="damaged"):
        get(hub, store)


def test_a_record_of_something_else_is_refused(hub: FakeHub, store: DataStore) -> None:
    get(hub, store)
    content = json.loads(store.record.read_text(encoding="utf-8"))
    content["files"][f"{REPO}/{FILE}"]["commit"] = "../../etc"
    store.record.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="damaged"):
        get(hub, store)
