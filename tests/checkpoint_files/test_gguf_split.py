"""GGUF models in several files: joined from any part; one missing, doubled or foreign is named."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from dflash_local.checkpoint_files.gguf_file import GgufFile
from dflash_local.checkpoint_files.gguf_header import open_gguf, read_gguf
from dflash_local.errors import CheckpointError
from tests.gguf_files import Tensor, gguf, key

NAMES = ["blk.0.a", "blk.0.b", "blk.1.a", "blk.1.b", "blk.2.a"]


def write(folder: Path, split: int, names: list[str] = NAMES, *, small_first: bool = False) -> list[Path]:
    """A model whose tensors [2, 4] hold their own numbers, in files of ``split`` tensors; 0 makes one file."""
    writer = GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=split, small_first_shard=small_first)
    writer.add_block_count(3)
    for number, name in enumerate(names):
        writer.add_tensor(name, np.full((2, 4), number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("small_first", [False, True])
def test_any_part_opens_the_model(tmp_path: Path, small_first: bool) -> None:
    (tmp_path / "one").mkdir()
    whole = open_gguf(write(tmp_path / "one", 0)[0])
    parts = write(tmp_path, 2, small_first=small_first)
    assert len(parts) == 3 + small_first and whole.metadata["llama.block_count"] == 3
    for part in parts:
        header = open_gguf(part)
        metadata = {name: value for name, value in header.metadata.items() if not name.startswith("split.")}
        assert metadata == whole.metadata and list(header.tensors) == NAMES and header.file == parts[0]
        for number, info in enumerate(header.tensors.values()):
            values = np.frombuffer(info.file.read_bytes()[info.offset :][: info.nbytes], dtype=np.float32)
            assert info.shape == (2, 4) and (values == number).all() and len(values) == 8
        first = {info.file: info.offset for info in reversed(header.tensors.values())}
        assert GgufFile(part).headers() == first, "what comes before a part's first tensor describes its tensors"


def test_a_single_file_is_its_own_model(tmp_path: Path) -> None:
    file = write(tmp_path, 0)[0]
    assert open_gguf(file) == read_gguf(file)
    one, none = key(b"split.count", 2, struct.pack("<H", 1)), key(b"split.count", 2, bytes(2))  # merged again
    for count in (one, none):
        file.write_bytes(gguf([count], [Tensor(b"a")]))
        assert list(open_gguf(file).tensors) == ["a"]


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_gguf(file)
    assert "\n" not in str(caught.value) and caught.value.hint and caught.value.exit_code == 6
    return caught.value.message


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second, third = write(tmp_path, 2)
    second.unlink()
    assert refusal(first) == refusal(third) == f"{second} is missing"
    second.symlink_to(second)
    assert refusal(first).startswith(f"{second} cannot be read")
    second.unlink()
    second.write_bytes(third.read_bytes()[:50])
    assert refusal(first).startswith(f"{second} is truncated")


def test_a_part_in_another_ones_place_is_named(tmp_path: Path) -> None:
    first, second, third = write(tmp_path, 2)
    second.unlink()
    second.symlink_to(first)
    assert refusal(third) == f"{second} is part 2 by its name, by its header split.no is 0"
    second.unlink()
    shutil.copy(third, second)
    assert refusal(first) == f"{second} is part 2 by its name, by its header split.no is 2"


def test_a_part_of_another_model_is_named(tmp_path: Path) -> None:
    first, second, _ = write(tmp_path, 2)
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", 2, [*NAMES, "blk.2.b"])[1]
    shutil.copy(other, second)
    assert refusal(first) == f"{second} is a part of another model: its split.tensors.count differs"
    (tmp_path / "longer").mkdir()
    shutil.copy(write(tmp_path / "longer", 1)[1], second)
    assert refusal(first) == f"{second} is a part of another model: its split.count differs"


@pytest.mark.parametrize("renamed", ["m.gguf", "m-00001-of-00002.gguf"])
def test_a_part_must_keep_its_name(tmp_path: Path, renamed: str) -> None:
    os.rename(write(tmp_path, 2)[0], tmp_path / renamed)
    assert refusal(tmp_path / renamed) == f"{tmp_path / renamed} is one of 3 parts, which its name does not say"


@pytest.mark.parametrize("count", [501, 65535])
def test_absurd_numbers_of_parts_are_refused(tmp_path: Path, count: int) -> None:
    file = tmp_path / f"m-00001-of-{count:05}.gguf"
    file.write_bytes(gguf([key(b"split.count", 2, struct.pack("<H", count))]))
    assert refusal(file) == f"{file}: split.count {count} is no number up to 500"
