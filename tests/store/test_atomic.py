"""Whole-file writes and private folders."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from dflash_local.store.atomic import make_private, write_atomic


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_are_0600_and_folders_0700_whatever_the_umask(tmp_path: Path, open_umask: object) -> None:
    write_atomic(tmp_path / "a" / "b" / "file", "secret")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "file") == 0o600


def test_the_old_content_stays_until_the_new_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"], "no temporary file stays"


@pytest.mark.skipif(os.name != "posix", reason="folders are not synced there")
def test_the_data_is_on_the_disk_before_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = tmp_path / "file", os.fsync
    synced: list[tuple[int, bool, int | None, bool]] = []

    def noted(descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(found.st_mode)
        synced.append((descriptor, is_folder, None if is_folder else found.st_size, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomic(path, "x" * 30)
    assert [what for _, *what in synced] == [[False, 30, False], [True, None, True]]
    for descriptor, *_ in synced:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_making_a_folder_that_is_there_changes_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private(tmp_path)
    assert mode(tmp_path) == 0o755
