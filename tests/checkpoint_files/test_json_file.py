"""The one reader of a checkpoint's JSON: plain files, bounded, and every room's files go through it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dflash_local.checkpoint_files.json_file import open_plain, parse_object, read_bytes, read_object
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint

ZERO = "/dev/zero"
needs_devices = pytest.mark.skipif(not os.path.exists(ZERO), reason="this system has no /dev/zero and no named pipes")


def message(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert caught.value.exit_code == 6
    return caught.value.message


def link(file: Path, to: str | Path) -> Path:
    file.symlink_to(to)
    return file


def pipe(file: Path) -> Path:
    os.mkfifo(file)
    return file


@needs_devices
def test_devices_pipes_folders_and_loops_are_named_and_not_waited_for(tmp_path: Path) -> None:
    odd = [link(tmp_path / "zero.json", ZERO), pipe(tmp_path / "pipe.json"), tmp_path]
    for file in odd:
        assert message(partial(read_object, file)) == f"{file} is not a plain file"
    loop = link(tmp_path / "loop.json", tmp_path / "loop.json")
    assert message(lambda: read_object(loop)).startswith(f"{loop} cannot be read: ")


def test_a_file_that_is_not_there_is_told_or_reads_as_empty(tmp_path: Path) -> None:
    dangling = link(tmp_path / "dangling.json", tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "none.json", dangling, tmp_path / "file" / "below.json"):
        assert message(partial(read_object, file)) == f"{file} does not exist"
        assert read_object(file, optional=True) == {}
        with pytest.raises(FileNotFoundError):
            open_plain(file)


def test_the_limit_is_the_last_size_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    assert read_object(file, limit=8) == {"a": 1} and read_bytes(file, 8) == b'{"a": 1}'
    assert message(lambda: read_object(file, limit=7)) == f"{file} is larger than 7 bytes"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b"{\xff}", "not valid JSON"),
        (b'{"a": %s}' % (b"1" * 5000), "not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"", "not valid JSON"),
    ],
    ids=["deep", "bytes", "digits", "list", "empty"],
)
def test_what_is_no_object_is_told(raw: bytes, said: str) -> None:
    assert said in message(lambda: parse_object(raw, "x.json"))


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": Checkpoint.open,
    "model.safetensors": Checkpoint.open,
    "model.safetensors.index.json": Checkpoint.open,
    "generation_config.json": lambda folder: open_source(folder).generation_config(),
    "tokenizer.json": lambda folder: open_source(folder).tokenizer(),
    "tokenizer_config.json": lambda folder: open_source(folder).tokenizer(),
    "special_tokens_map.json": lambda folder: open_source(folder).tokenizer(),
    "added_tokens.json": lambda folder: open_source(folder).tokenizer(),
    "chat_template.jinja": lambda folder: open_source(folder).tokenizer(),
    "chat_template.json": lambda folder: open_source(folder).tokenizer(),
}


@needs_devices
@pytest.mark.parametrize("make", [lambda file: link(file, ZERO), pipe], ids=["zero", "pipe"])
@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_what_never_ends(tmp_path: Path, name: str, make: Callable[[Path], Path]) -> None:
    for other, text in {"config.json": "{}", "tokenizer.json": '{"model": {}}'}.items():
        (tmp_path / other).write_text(text)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    assert message(lambda: READERS[name](tmp_path)) == f"{tmp_path / name} is not a plain file"
