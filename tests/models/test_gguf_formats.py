"""GGUF blocks as the engine keeps them: to the bit what the gguf library decodes, whichever way they are read."""

from __future__ import annotations

from pathlib import Path

import gguf as library
import pytest
import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.errors import CheckpointError
from dflash_local.kernels import gguf_blocks as gguf_blocks_module
from dflash_local.models import weight_stream
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import check_places
from dflash_local.models.fused import gguf_formats
from dflash_local.models.place import Conversion, Place
from tests.gguf_models import GOLDEN, all_of, write_model
from tests.quantized_weights import gguf, gguf_blocks

CPU = torch.device("cpu")


def oracle(blocks: torch.Tensor, dtype: str) -> torch.Tensor:
    return torch.from_numpy(library.quants.dequantize(blocks.numpy(), library.GGMLQuantizationType[dtype]))


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype == torch.float32 and torch.equal(one.view(torch.int32), two.view(torch.int32))


@pytest.mark.parametrize("dtype", GGUF_TYPES)
def test_what_is_kept_stands_for_what_the_library_decodes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, some rows, and taken apart a few rows at a time."""
    blocks = gguf_blocks(dtype, 24, 512)
    want = oracle(blocks, dtype)
    weight = gguf(dtype, 24, 512)
    assert weight.shape == (24, 512) and same_bits(weight.dequantized(), want)
    assert same_bits(weight.dequantized(slice(5, 9)), want[5:9])
    monkeypatch.setattr(gguf_formats, "CARD_CHUNK", 5 * 512)
    assert same_bits(gguf(dtype, 24, 512).dequantized(), want)


@pytest.mark.parametrize("name", sorted(file.stem for file in GOLDEN.glob("*.gguf")))
def test_the_ring_reads_what_is_read_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every file of a converter: values undone, parts joined, and casts to another dtype."""
    checkpoint = Checkpoint.open(GOLDEN / f"{name}.gguf")
    want = dict(checkpoint.read())
    monkeypatch.setattr(gguf_blocks_module, "CHUNK", 64)
    places: dict[str, list[Place]] = {
        key: [torch.zeros(each.shape, dtype=torch.bfloat16 if each.ndim > 1 else torch.float32)]
        for key, each in want.items()
    }
    assert all(map(weight_stream.takes, checkpoint.tensors.values()))
    found = weight_stream.fill(list(checkpoint.tensors.values()), places, CPU, size=1000)
    for key, (place,) in places.items():
        assert isinstance(place, torch.Tensor) and torch.equal(place, want[key].to(place.dtype)), key
    assert len(found) == len(want) and all(each.stored is not None for each in found)


@pytest.mark.parametrize("dtype", GGUF_TYPES)
def test_blocks_go_through_the_ring_undecoded(dtype: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "model.gguf", "llama", all_of(dtype)))
    names = [name for name, info in checkpoint.tensors.items() if info.dtype == dtype]
    want, taken = dict(checkpoint.read(names=names)), dict[str, torch.Tensor]()
    places: dict[str, list[Place]] = {
        name: [
            Conversion(
                checkpoint.tensors[name].shape,
                torch.uint8,
                lambda rows, name=name: taken.update({name: rows.clone()}),  # type: ignore[misc]
                blocks=dtype,
            )
        ]
        for name in names
    }
    checkpoint.fill(places)
    one_by_one, taken = taken, {}
    weight_stream.fill([checkpoint.tensors[name] for name in names], places, CPU, size=1000)
    assert any(checkpoint.tensors[name].undo for name in names), "rows of queries and keys are put in order"
    for name in names:
        assert torch.equal(taken[name], one_by_one[name]) and torch.equal(oracle(taken[name], dtype), want[name])


@pytest.mark.parametrize("dtype", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("ring", [False, True])
def test_a_scale_that_is_no_number_is_refused(dtype: str, ring: bool, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", all_of(dtype))
    checkpoint = Checkpoint.open(file)
    info = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    at = {"Q6_K": 208}.get(dtype, 0)
    with file.open("r+b") as stream:
        stream.seek(info.offset + 7 * BLOCKS[dtype][1] + at)
        stream.write(b"\xff" if dtype == "MXFP4" else b"\x00\x7e")
    place = Conversion(info.shape, torch.uint8, lambda _: None, blocks=dtype)
    if ring:
        (found,) = weight_stream.fill([info], {info.name: [place]}, CPU)
        assert found.stored is None
        return
    with pytest.raises(CheckpointError, match="up_proj.weight .* holds NaN or infinity"):
        checkpoint.fill({info.name: [place]})


def test_blocks_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "model.gguf", "llama", all_of("Q4_1")))
    name = "model.layers.1.mlp.up_proj.weight"
    place = Conversion(checkpoint.tensors[name].shape, torch.uint8, lambda _: None, blocks="Q4_0")
    with pytest.raises(CheckpointError, match=f"{name} is stored as Q4_1, expected Q4_0"):
        check_places(checkpoint, [name], {name: place})
