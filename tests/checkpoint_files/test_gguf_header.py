"""Headers of GGUF files: equal to the gguf library's reading, and what is damaged or hostile refused in one line."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter

from dflash_local.checkpoint_files import gguf_header
from dflash_local.checkpoint_files.gguf_header import GgufHeader, gguf_of, is_gguf, read_gguf
from dflash_local.checkpoint_files.tensor_info import BLOCKS, GGML_TYPES, UNREAD, TensorInfo, check_types
from dflash_local.errors import CheckpointError
from tests.gguf_files import Tensor, array, gguf, key, string

VALUES: dict[str, tuple[str, Any]] = {
    "x.u8": ("uint8", 255),
    "x.i8": ("int8", -128),
    "x.u16": ("uint16", 65535),
    "x.i16": ("int16", -32768),
    "x.u32": ("uint32", 2**32 - 1),
    "x.i32": ("int32", -(2**31)),
    "x.u64": ("uint64", 2**64 - 1),
    "x.i64": ("int64", -(2**63)),
    "x.f32": ("float32", 0.25),
    "x.f64": ("float64", 1e-300),
    "x.yes": ("bool", True),
    "x.no": ("bool", False),
    "x.text": ("string", "{{ 'ä' }}\n"),
    "x.numbers": ("array", [1, -2, 3]),
    "x.floats": ("array", [0.5, -1.0]),
    "x.flags": ("array", [True, False]),
    "x.bytes": ("array", bytes(range(5))),
    "x.words": ("array", ["", "Ġthe", "a\x00b", "日本"]),
}
KNOWN = {kind.name: kind for kind in GGMLQuantizationType}  # the library's, which knows no repacked ones and no Q2_0


def write(file: Path, endianess: GGUFEndian = GGUFEndian.LITTLE) -> None:
    """Every type of value, every type of tensor, ranks 1 to 4, an alignment of its own."""
    writer = GGUFWriter(file, "llama", endianess=endianess)
    writer.add_custom_alignment(64)
    for name, (of_type, value) in VALUES.items():
        getattr(writer, f"add_{of_type}")(name, value)
    for number, kind in enumerate(GGMLQuantizationType):
        _, size = GGML_QUANT_SIZES[kind]
        shape = (2, 3, 2, 2 * size)[number % 4 :]
        data = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
        writer.add_tensor(f"blk.{number}.{kind.name}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_headers_equal_the_librarys(file: Path) -> None:
    header, reader = read_gguf(file), GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields and header.metadata["general.alignment"] == 64 and header.file == file
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors] and len(header.tensors) > 30
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.name, info.dtype, info.file) == (tensor.name, tensor.tensor_type.name, file)
        assert (info.shape, info.offset) == (tuple(map(int, reversed(tensor.shape))), tensor.data_offset)
        if info.dtype != "Q8_1":  # the library's size of it is that of an older form; no file holds it
            assert info.nbytes == tensor.n_bytes
            assert bytes(tensor.data.tobytes()) == file.read_bytes()[info.offset :][: info.nbytes]


def test_nested_arrays_stay_nested(tmp_path: Path) -> None:
    inner = array(9, 2, array(5, 2, struct.pack("<2i", 1, -2)) + array(8, 1, string(b"a")))
    assert read(tmp_path, gguf([key(b"x", 9, inner)])).metadata == {"x": [[1, -2], ["a"]]}


def test_the_first_bytes_of_a_file_are_enough(file: Path) -> None:
    """As fetched from a server before the download; a piece that ends inside the header is truncated."""
    whole, size = file.read_bytes(), file.stat().st_size
    end = min(info.offset for info in read_gguf(file).tensors.values())
    assert gguf_of(io.BytesIO(whole[:end]), file, size) == read_gguf(file)
    for cut in range(0, end - 64, 7):
        with pytest.raises(CheckpointError, match="is truncated|is empty|no GGUF"):
            gguf_of(io.BytesIO(whole[:cut]), file, size)
    last = gguf([key(b"x", 8, string(b""))], data=b"", alignment=1)
    for cut in (1, 8):  # an empty string, of whose length not all is there
        with pytest.raises(CheckpointError, match="is truncated"):
            gguf_of(io.BytesIO(last[:-cut]), file, len(last))


def test_types_and_sizes_are_the_librarys() -> None:
    assert {number: name for number, name in GGML_TYPES.items() if name in KNOWN} == {
        int(kind): name for name, kind in KNOWN.items()
    }
    assert {name: BLOCKS[name] for name in KNOWN if name != "Q8_1"} == {
        name: GGML_QUANT_SIZES[kind] for name, kind in KNOWN.items() if name != "Q8_1"
    }
    assert set(GGML_TYPES.values()) <= set(BLOCKS) and set(UNREAD) <= set(GGML_TYPES.values())


@pytest.mark.parametrize(("dtype", "near"), [("Q2_K", "Q4_K_M"), ("IQ3_XXS", "IQ4_XS"), ("Q4_0_4_8", "Q4_0")])
def test_types_that_are_not_read_name_the_nearest(dtype: str, near: str) -> None:
    tensors = [TensorInfo(name, name, (256,), Path("m.gguf")) for name in (*(set(GGML_TYPES.values()) - set(UNREAD)),)]
    check_types(tensors)
    with pytest.raises(CheckpointError) as caught:
        check_types([*tensors, TensorInfo("blk.0.ffn_up.weight", dtype, (256,), Path("m.gguf"))])
    assert str(caught.value) == (
        f"m.gguf: {dtype} weights are not read ('blk.0.ffn_up.weight') (the nearest form that is: {near})"
    )
    assert caught.value.exit_code == 6


def test_gguf_is_known_by_its_first_bytes(file: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-00"
    file.rename(blob)
    (tmp_path / "short").write_bytes(b"GGU")
    assert is_gguf(blob)
    assert not any(is_gguf(tmp_path / name) for name in ("short", "missing", ".", "short/below"))


def read(folder: Path, raw: bytes) -> GgufHeader:
    (folder / "m.gguf").write_bytes(raw)
    return read_gguf(folder / "m.gguf")


def deep(levels: int) -> bytes:
    value = array(4, 1, struct.pack("<I", 1))
    for _ in range(levels - 1):
        value = array(9, 1, value)
    return key(b"x", 9, value)


A, B = Tensor(b"a"), Tensor(b"b", offset=32)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    "html": (b"\n<!DOCTYPE html><html>404</html>", "web page"),
    "pickle": (b"\x80\x02}q\x00." + bytes(40), "pickle"),
    "old ggml": (b"tjgg" + bytes(60), "no GGUF file: it begins with b'tjgg'"),
    "short": (b"GGUF\x03\x00", "truncated"),
    "version 1": (gguf(version=1), "version 1, 2 and 3 are read"),
    "version 4": (gguf(version=4), "version 4"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "keys": (gguf(counts=(0, 2**60)), "cannot hold 1152921504606846976 keys"),
    "tensors": (gguf(counts=(2**63, 0)), "cannot hold 9223372036854775808 tensors"),
    "many tensors": (gguf(counts=(300_001, 0), data=bytes(8_000_000)), "declares 300001 tensors, at most 300000"),
    "key of 4 GB": (gguf([string(b"k", 2**32)]), "a key of 4294967296 bytes, at most 500"),
    "text of 4 GB": (gguf([key(b"k", 8, string(b"v", 2**32))]), "value of 'k' of 4294967296 bytes"),
    "text to the end": (gguf([key(b"k", 8, string(b"v", 2**20))]), "truncated"),
    "entry of 4 GB": (gguf([key(b"k", 9, array(8, 1, string(b"v", 2**32)))]), "entry of 'k' of 4294967296 bytes"),
    "array": (gguf([key(b"k", 9, array(4, 2**60, b""))]), "cannot hold 1152921504606846976 entries of 'k'"),
    "many entries": (gguf([key(b"k", 9, array(0, 4_000_001, bytes(4_000_001)))]), "at most 4000000"),
    "two long arrays": (gguf([key(bytes([n]), 9, array(0, 2**21, bytes(2**21))) for n in b"ab"]), "at most 1902848"),
    "depth": (gguf([deep(5)]), "'x' has arrays too deep"),
    "endless depth": (gguf([key(b"x", 9, array(9, 1, b"") * 10_000)]), "arrays too deep"),
    "type of value": (gguf([key(b"x", 13, bytes(8))]), "'x' has unknown type 13"),
    "type of entry": (gguf([key(b"x", 9, array(77, 2, bytes(16)))]), "'x' has unknown type 77"),
    "key twice": (gguf([key(b"x", 4, bytes(4))] * 2), "holds the key 'x' twice"),
    "broken key": (gguf([key(b"\xff", 4, bytes(4))]), "a key is not UTF-8"),
    "broken text": (gguf([key(b"x", 8, string(b"\xc3"))]), "value of 'x' is not UTF-8"),
    "alignment 3": (gguf([key(b"general.alignment", 4, struct.pack("<I", 3))]), "3 is no power of two"),
    "alignment 0": (gguf([key(b"general.alignment", 4, bytes(4))]), "alignment 0 is no power"),
    "alignment 2^31": (gguf([key(b"general.alignment", 4, struct.pack("<I", 2**31))]), "no power of two up to 1048576"),
    "alignment true": (gguf([key(b"general.alignment", 7, b"\x01")]), "alignment True"),
    "name": (gguf(tensors=[Tensor(b"a" * 501)]), "a tensor's name of 501 bytes"),
    "tensor twice": (gguf(tensors=[A, A._replace(offset=32)]), "holds the tensor 'a' twice"),
    "rank": (gguf(tensors=[Tensor(b"a", (1,) * 5)]), "impossible dims, 5 of them"),
    "dims 2^60": (gguf(tensors=[Tensor(b"a", (2**60,) * 4)]), "truncated: 160 bytes, 'a' ends at byte an integer of"),
    "no dims": (gguf(tensors=[Tensor(b"a", (4, 0))]), "impossible dims"),
    "type": (gguf(tensors=[Tensor(b"a", kind=4)]), "'a' has the unknown type 4"),
    "type 2^31": (gguf(tensors=[Tensor(b"a", kind=2**31)]), "unknown type 2147483648"),
    "half a block": (gguf(tensors=[Tensor(b"a", (48, 2), 3)]), "no whole blocks of Q4_1"),
    "a scalar's block": (gguf(tensors=[Tensor(b"a", (), 3)]), "no whole blocks of Q4_1"),
    "not aligned": (gguf(tensors=[Tensor(b"a", offset=8)]), "is not aligned"),
    "overlap": (gguf(tensors=[Tensor(b"a", (9,)), B]), "'b' overlaps"),
    "beyond the end": (gguf(tensors=[A, B._replace(offset=64)]), "truncated: 160 bytes, 'b' ends at byte 176"),
    "offset 2^63": (gguf(tensors=[Tensor(b"a", offset=2**63)]), "truncated"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    raw, said = DAMAGED[name]
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, raw)
    assert said in caught.value.message and caught.value.hint and caught.value.exit_code == 6
    assert caught.value.message.startswith(f"{tmp_path / 'm.gguf'}") and "\n" not in str(caught.value)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        read_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_gguf(tmp_path)


def test_headers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gguf_header.MAX_HEADER_BYTES == 100_000_000
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1000)
    for value in (array(8, 100, string(b"12345678") * 100), array(4, 500, bytes(2000))):
        with pytest.raises(CheckpointError, match="header of more than 1000 bytes"):
            read(tmp_path, gguf([key(b"k", 9, value)]))


def test_the_smallest_files_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, gguf(data=b"")) == GgufHeader({}, {}, tmp_path / "m.gguf")
    scalar = read(tmp_path, gguf(tensors=[Tensor(b"a", ())], data=bytes(4))).tensors["a"]
    assert (scalar.shape, scalar.nbytes) == ((), 4)
    assert read(tmp_path, gguf([deep(4)])).metadata == {"x": [[[[1]]]]}
    swapped = read(tmp_path, gguf(tensors=[B, A])).tensors  # the order of the data need not be that of the header
    assert swapped["b"].offset == swapped["a"].offset + 32 and list(swapped) == ["b", "a"]


LIES = (0, 1, 2**16, 2**31 - 1, 2**32, 2**60, 2**63, 2**64 - 1)


def flipped(raw: bytearray, random_: random.Random, end: int) -> bytes:
    for _ in range(random_.choice((1, 1, 2, 8))):
        raw[random_.randrange(end)] ^= 1 << random_.randrange(8)
    return bytes(raw)


def lying(raw: bytearray, random_: random.Random, end: int) -> bytes:
    """Eight or four bytes anywhere replaced by a number of those that counts, lengths and dims must not have."""
    width = random_.choice((4, 8))
    place = random_.randrange(8, end - width)
    raw[place : place + width] = (random_.choice(LIES) % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(raw)


def cut(raw: bytearray, random_: random.Random, end: int) -> bytes:
    return bytes(raw[: random_.randrange(len(raw) if random_.random() < 0.5 else end)])


def moved(raw: bytearray, random_: random.Random, end: int) -> bytes:
    """A piece left out, or there twice."""
    start, length = random_.randrange(end), random_.randrange(1, 40)
    piece = raw[start : start + length]
    return bytes(raw[:start] + (piece * 2 if random_.random() < 0.5 else b"") + raw[start + length :])


@pytest.mark.parametrize("mutate", [flipped, lying, cut, moved])
def test_mutated_files_give_a_header_or_one_line(
    file: Path, mutate: Callable[[bytearray, random.Random, int], bytes]
) -> None:
    raw, random_ = file.read_bytes(), random.Random(mutate.__name__)
    end = min(info.offset for info in read_gguf(file).tensors.values())
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(300):
            changed = mutate(bytearray(raw), random_, end)
            try:
                header = gguf_of(io.BytesIO(changed), file, len(changed))
                assert all(info.offset + info.nbytes <= len(changed) for info in header.tensors.values())
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 400, str(error)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > 30 and peak < 2**20 + 10 * len(raw)
