"""Sequences on disk are found whole or not at all, whatever happens to their files and to who writes them."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_local.store import sequence_files
from dflash_local.store.sequence_files import MARK, STALE_S, SUFFIX, SequenceFiles

ROOM = 2**20
BODY = bytes(range(256)) * 3
# Writes one sequence after another until it is killed.
WRITER = """
import sys
from pathlib import Path
from dflash_local.store.sequence_files import SequenceFiles
files, number = SequenceFiles(Path(sys.argv[1]), "key", 2**26), int(sys.argv[2])
print("ready", flush=True)
while True:
    number += 1
    files.write([number, number], [1], {}, [memoryview(number.to_bytes(4, "big") * 200_000)])
"""


def write(files: SequenceFiles, ids: Sequence[int], body: bytes = BODY) -> Path:
    before = {each.path for each in files.stored()}
    files.write(ids, [1], {"a": [1, None]}, [memoryview(body[:100]), memoryview(body[100:])])
    return next(each.path for each in files.stored() if each.path not in before)


def found(files: SequenceFiles) -> list[list[int]]:
    return sorted(each.ids for each in files.stored())


def test_what_is_written_is_found_by_others_in_its_folder_alone(tmp_path: Path) -> None:
    write(SequenceFiles(tmp_path, "key", ROOM), [1, 2, 3])
    (stored,) = SequenceFiles(tmp_path, "key", ROOM).stored()
    now, body = SequenceFiles(tmp_path, "key", ROOM).read(stored) or (None, b"")
    assert (now, body[:]) == (stored, BODY) and stored.ids == [1, 2, 3] and stored.content == {"a": [1, None]}
    assert SequenceFiles(tmp_path, "other weights", ROOM).stored() == []


def test_a_damaged_byte_anywhere_is_noticed_and_the_file_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_files, "PART", 300)  # of a body of 768 bytes, in pieces of 100 and 668
    files = SequenceFiles(tmp_path, "key", ROOM)
    path = write(files, [1, 2, 3])
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        stored = SequenceFiles(tmp_path, "key", ROOM).stored()
        assert [each for each in stored if files.read(each) is not None] == [] and not path.exists(), at
    assert len(caplog.records) == len(whole) and all(each.levelno == logging.WARNING for each in caplog.records)
    for wrong in (whole[:-1], whole + b"\0", MARK, b""):
        path.write_bytes(wrong)
        assert files.stored() == [] and not path.exists()


def test_a_file_that_is_damaged_or_gone_after_it_was_listed_is_not_found(tmp_path: Path) -> None:
    files = SequenceFiles(tmp_path, "key", ROOM)
    for spoil in (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")):
        path = write(files, [1, 2, 3])
        (stored,) = files.stored()
        spoil(path)
        assert files.read(stored) is None and files.stored() == []


def test_a_file_that_another_program_wrote_anew_is_read_as_it_is_now(tmp_path: Path) -> None:
    files = SequenceFiles(tmp_path, "key", ROOM)
    write(files, [1, 2, 3])
    (stored,) = files.stored()
    SequenceFiles(tmp_path, "key", ROOM).write([1, 2, 3], [2], {}, [memoryview(b"newer")])
    now, body = files.read(stored) or (None, b"")
    assert body[:] == b"newer" and now is not None and now.lengths == [2]


def test_the_oldest_go_of_all_folders(tmp_path: Path) -> None:
    size = write(SequenceFiles(tmp_path / "size", "key", ROOM), [1, 1]).stat().st_size
    other, files = (SequenceFiles(tmp_path / "all", key, 3 * size) for key in ("other", "key"))
    for age, (where, ids) in enumerate([(other, [1, 1]), (files, [2, 2]), (files, [3, 3])]):
        os.utime(write(where, ids), (time.time() + age - 100,) * 2)
    write(files, [4, 4])
    assert (found(other), found(files)) == ([], [[2, 2], [3, 3], [4, 4]])
    (second,) = (each for each in files.stored() if each.ids == [2, 2])
    assert files.read(second) is not None, "it was used, so the next one is older"
    write(files, [5, 5])
    assert found(files) == [[2, 2], [4, 4], [5, 5]]
    files.write([6, 6], [], {}, [memoryview(bytes(4 * size))])
    assert [6, 6] not in found(files) and found(files), "what has no room at all takes none from others"


def test_a_longer_one_takes_the_place_of_its_beginnings(tmp_path: Path) -> None:
    files = SequenceFiles(tmp_path, "key", ROOM)
    for ids in ([1, 2], [1, 3], [1, 2, 3], [1, 2, 3]):
        files.write(ids, [], {}, [memoryview(BODY)])
    assert found(files) == [[1, 2, 3], [1, 3]]


def test_parts_that_a_killed_program_left_go_when_nobody_writes_them(tmp_path: Path) -> None:
    files = SequenceFiles(tmp_path, "key", ROOM)
    folder = write(files, [1, 1]).parent
    fresh, stale = folder / f".a{SUFFIX}.1.tmp", folder / f".b{SUFFIX}.2.tmp"
    for part, age in ((fresh, 0.0), (stale, 2 * STALE_S)):
        part.write_bytes(b"part")
        os.utime(part, (time.time() - age,) * 2)
    write(files, [2, 2])
    assert fresh.exists() and not stale.exists() and found(files) == [[1, 1], [2, 2]]


@pytest.mark.parametrize("rounds", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_whole_files(rounds: int, tmp_path: Path) -> None:
    draw, seen = random.Random(1), 0
    for turn in range(rounds):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * turn)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline()
            time.sleep(draw.uniform(0.01, 0.2))
            writer.kill()
        files = SequenceFiles(tmp_path, "key", 2**26)
        for stored in files.stored():
            number, (_, body) = stored.ids[0], files.read(stored) or (None, b"")
            assert body[:] == number.to_bytes(4, "big") * 200_000, "found and wrong"
            seen += 1
    assert seen
