"""Checkpoints that are damaged, incomplete or not checkpoints: refused by name before a tensor is read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_local.checkpoint_files import safetensors_header
from dflash_local.checkpoint_files.safetensors_header import MAX_HEADER_BYTES, read_header
from dflash_local.errors import CheckpointError
from dflash_local.models.checkpoint import Checkpoint

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


def folder_with(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return path


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "config.json").write_text("{}")
    file = path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(begin: int, end: int, shape: list | None = None, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def sharded(path: Path) -> Path:
    (path / "config.json").write_text("{}")
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, path / f"m-{number}.safetensors")
    index = {"weight_map": {"a.weight": "m-0.safetensors", "b.weight": "m-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("layout", [folder_with, sharded])
def test_reads_both_layouts(tmp_path: Path, layout: Callable[[Path], Path]) -> None:
    checkpoint = Checkpoint.open(layout(tmp_path))
    assert checkpoint.tensors["a.weight"].shape == (2, 3) and checkpoint.tensors["b.weight"].dtype == "BF16"
    assert checkpoint.nbytes == 6 * 4 + 4 * 2
    read = dict(checkpoint.read(dtype=torch.float32))
    assert torch.equal(read["a.weight"], TENSORS["a.weight"]) and read["b.weight"].dtype == torch.float32
    assert [name for name, _ in checkpoint.read(names=["b.weight"])] == ["b.weight"]
    with pytest.raises(CheckpointError, match="no tensor nope"):
        list(checkpoint.read(names=["nope"]))


DAMAGED = {
    "html": (b"<!DOCTYPE html><html><body>404 not found</body></html>", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs pointer"),
    "pickle": (b"\x80\x02}q\x00." + bytes(40), "pickle"),
    "zip": (b"PK\x03\x04" + bytes(60), "pickle or zip"),
    "empty": (b"", "truncated"),
    "short": (b"\x10\x00", "truncated"),
    "header cut": (struct.pack("<Q", 500) + b'{"a":', "truncated"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_safetensors_is_named(tmp_path: Path, name: str) -> None:
    data, said = DAMAGED[name]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as caught:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in caught.value.message and caught.value.exit_code == 6 and caught.value.hint


HEADERS = {
    "truncated data": ({"a": entry(0, 8)}, 4, "truncated"),
    "trailing": ({"a": entry(0, 8)}, 12, "4 bytes after"),
    "hole": ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "hole before"),
    "overlap": ({"a": entry(0, 6), "b": entry(4, 8)}, 8, "overlap at"),
    "wrong size": ({"a": entry(0, 8, [3], "F32")}, 8, "needs 12 bytes"),
    "negative": ({"a": entry(0, 8, [-8])}, 8, "impossible shape"),
    "dtype": ({"a": entry(0, 8, [8], "PICKLE")}, 8, "unknown dtype"),
    "offsets": ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0]}}, 8, "impossible offsets"),
    "entry": ({"a": 7}, 8, "damaged entry"),
    "name": ({"layers.1." * 10_000: entry(0, 8, [8])}, 8, "has a name of 90000 characters"),
    "number": ({"a": entry(0, 8, [10**400])}, 8, "a number in it has 401 digits"),
    "not an object": ([1, 2, 3], 0, "header of .* must hold a JSON object"),
    "twice": (b'{"a":{},"a":{}}', 0, "header of .* holds 'a' twice"),
    "not json": (b"{not json at all}", 0, "header of .* is not valid JSON"),
    "deep": (b"[" * 200_000, 0, "nested too deeply|not valid JSON"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_header(tmp_path: Path, name: str) -> None:
    header, size, said = HEADERS[name]
    with pytest.raises(CheckpointError, match=said):
        read_header(raw_file(tmp_path, header, bytes(size)))


def test_too_many_tensors_and_too_long_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert safetensors_header.MAX_ENTRIES == 300_000 and MAX_HEADER_BYTES == 100_000_000  # a mixture stored per expert
    monkeypatch.setattr(safetensors_header, "MAX_ENTRIES", 50)
    entries = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(50)}
    assert len(read_header(raw_file(tmp_path, entries))) == 50
    with pytest.raises(CheckpointError, match="51 tensors"):
        read_header(raw_file(tmp_path, {**entries, "more": entries["t0"]}))
    long = raw_file(tmp_path, {}, length=MAX_HEADER_BYTES + 1)
    with pytest.raises(CheckpointError, match="has a header of"):
        read_header(long)


def test_shards_are_checked_against_the_index(tmp_path: Path) -> None:
    index = sharded(tmp_path) / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]

    def refused(weight_map: object, said: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=said):
            Checkpoint.open(tmp_path)

    refused({**good, "c.weight": "m-0.safetensors"}, "m-0.safetensors lacks the tensor 'c.weight'")
    refused({**good, "a.weight": "m-9.safetensors"}, "m-9.safetensors is missing")
    refused({**good, "a.weight": "../x.safetensors"}, "not a shard's name")
    refused({}, "no weight_map")
    save_file(TENSORS, tmp_path / "m-1.safetensors")
    refused(good, "'a.weight' is in both")


def test_nan_and_infinity_name_the_tensor(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        folder_with(tmp_path, {"ok": torch.ones(3), "broken": torch.tensor([1.0, bad])})
        with pytest.raises(CheckpointError, match="tensor broken in .* holds NaN or infinity"):
            list(Checkpoint.open(tmp_path).read())
    folder_with(tmp_path, {"wide": torch.tensor([1e30])})
    with pytest.raises(CheckpointError, match="wide .* does not fit torch.float16"):
        list(Checkpoint.open(tmp_path).read(dtype=torch.float16))


def test_pickles_are_refused_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").mkdir()  # opening it would fail differently
    with pytest.raises(CheckpointError, match="pytorch_model.bin .*safetensors and GGUF only"):
        Checkpoint.open(tmp_path)


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "no")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)


def test_headers_are_read_without_torch_and_fast(tmp_path: Path) -> None:
    folder_with(tmp_path)
    code = (
        "import sys; from pathlib import Path; from dflash_local.models.checkpoint import Checkpoint;"
        "Checkpoint.open(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60).returncode == 0
    raw_file(tmp_path, {f"t{i}": entry(i, i + 1) for i in range(20_000)}, bytes(20_000))
    start = time.process_time()
    assert len(Checkpoint.open(tmp_path).tensors) == 20_000
    assert time.process_time() - start < 5
