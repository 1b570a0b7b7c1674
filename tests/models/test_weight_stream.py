"""Weights streamed through the ring, on a CPU: the same bytes and the same refusals as tensor by tensor."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_local.errors import CheckpointError
from dflash_local.models import weight_stream
from dflash_local.models.checkpoint import Checkpoint, _device
from dflash_local.models.place import Conversion, Place

CPU = torch.device("cpu")


def checkpoint_with(path: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return Checkpoint.open(path)


def several() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": (7, 33), "b": (5,), "c": (64, 40), "d": (3, 1, 4), "e": (0, 4), "f": (129,)}
    dtypes = {"a": torch.bfloat16, "c": torch.float16, "f": torch.float64}
    return {
        name: torch.randn(size, generator=generator).to(dtypes.get(name, torch.float32)) for name, size in sizes.items()
    }


@pytest.mark.parametrize("size", [64, 100, 1000, weight_stream.WINDOW])
def test_every_byte_lands_in_every_place(tmp_path: Path, size: int) -> None:
    """Windows smaller than a tensor and larger than all; more windows than the ring has buffers."""
    tensors = several()
    checkpoint = checkpoint_with(tmp_path, tensors)
    fused = torch.zeros(14, 33, dtype=torch.bfloat16)  # a place may be rows of a larger tensor
    places = {name: [torch.full(t.shape, 9.0, dtype=t.dtype)] for name, t in tensors.items() if name != "d"}
    places["a"] = [fused[7:], torch.zeros(7, 33)]
    places["b"] = [torch.zeros(4, 5), torch.zeros(2, 3, 5)]  # or hold it several times
    places["c"] = [torch.zeros(40, 64, dtype=torch.float32).t()]
    fractions: list[float] = []
    found = weight_stream.fill([checkpoint.tensors[name] for name in places], places, CPU, fractions.append, size)
    for name, held in places.items():
        for place in held:
            assert torch.equal(place, tensors[name].to(place.dtype).expand_as(place)), name
    assert not fused[:7].any()
    assert fractions == sorted(fractions) and fractions[-1] == 1
    peaks = {each.info.name: each.stored for each in found}
    assert peaks == {name: tensors[name].abs().max().item() for name in places if tensors[name].numel()}


def test_codes_land_as_they_are(tmp_path: Path) -> None:
    """Of four and eight bits: turned round, straight, or handed to what unpacks them."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (6, 10), generator=generator, dtype=torch.int32)
    fp8 = torch.randn(9, 7, generator=generator).to(torch.float8_e4m3fn)
    small = torch.randint(0, 255, (11,), generator=generator, dtype=torch.uint8)
    checkpoint = checkpoint_with(tmp_path, {"words": words, "fp8": fp8, "small": small})
    taken: list[torch.Tensor] = []
    turned, straight = torch.zeros(10, 6, dtype=torch.int32), torch.zeros(18, 7, dtype=torch.float8_e4m3fn)
    places: dict[str, list[Place]] = {
        "words": [turned.t()],
        "fp8": [straight[9:]],
        "small": [Conversion((11,), torch.uint8, lambda tensor: taken.append(tensor.clone()))],
    }
    found = weight_stream.fill(list(checkpoint.tensors.values()), places, CPU, size=64)
    assert torch.equal(turned, words.t()) and torch.equal(taken[0], small)
    assert torch.equal(straight[9:].view(torch.uint8), fp8.view(torch.uint8)) and not straight[:9].float().any()
    assert [each.info.name for each in found] == ["fp8"]  # integers are always numbers
    assert found[0].stored is not None


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_among_codes_is_found_by_both_ways_to_read(tmp_path: Path, code: int) -> None:
    codes = torch.ones(4, 5).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[2, 3] = code
    checkpoint = checkpoint_with(tmp_path, {"a": codes})
    places = {"a": [torch.empty_like(codes)]}
    assert weight_stream.fill([checkpoint.tensors["a"]], places, CPU)[0].stored is None
    with pytest.raises(CheckpointError, match="tensor a in .* holds NaN"):
        checkpoint.fill(places)


@pytest.mark.parametrize("gap", [0, 60, weight_stream.GAP])
def test_windows_skip_what_is_not_wanted(tmp_path: Path, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wanted byte is read once, and of other tensors only what lies between wanted ones, a gap at most."""
    monkeypatch.setattr(weight_stream, "GAP", gap)
    checkpoint = checkpoint_with(tmp_path, several())
    wanted = [checkpoint.tensors[name] for name in ("a", "c", "f")]
    found = list(weight_stream.windows(wanted, 200))
    for window in found:
        ends = [(part.at, part.at + part.end - part.begin) for part in window.parts]
        assert ends[0][0] == 0 and ends[-1][1] == window.size <= 200
        assert all(0 <= begin - end <= gap for (_, end), (begin, _) in pairwise(ends))
    landed = sorted((part.info.name, part.begin, part.end) for window in found for part in window.parts)
    assert sum(end - begin for _, begin, end in landed) == sum(info.nbytes for info in wanted)
    assert all(one[0] != other[0] or one[2] == other[1] for one, other in pairwise(landed))
    covered = sorted((window.offset, window.offset + window.size) for window in found)
    assert all(end <= begin for (_, end), (begin, _) in zip(covered, covered[1:], strict=False))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_has_no_peak(tmp_path: Path, bad: float) -> None:
    tensors = {"a": torch.ones(300), "b": torch.ones(4, 5)}
    tensors["b"][2, 3] = bad
    checkpoint = checkpoint_with(tmp_path, tensors)
    places = {name: [torch.empty_like(tensor)] for name, tensor in tensors.items()}
    found = {e.info.name: e.stored for e in weight_stream.fill(list(checkpoint.tensors.values()), places, CPU, size=64)}
    assert found == {"a": 1.0, "b": None}


def test_a_value_too_large_for_its_place_is_told_apart(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {"a": torch.tensor([1e6, 2.0])})
    places = {"a": [torch.empty(2, dtype=torch.float16)]}
    found = weight_stream.fill([checkpoint.tensors["a"]], places, CPU)
    assert (found[0].stored, found[0].placed) == (1e6, None)
    with pytest.raises(CheckpointError, match="tensor a .* does not fit torch.float16"):
        checkpoint.fill(places)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {"a": torch.ones(1000)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        weight_stream.fill([checkpoint.tensors["a"]], {"a": [torch.empty(1000)]}, CPU, size=256)


def test_filling_checks_like_reading(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {"a.weight": torch.zeros(3), "b.weight": torch.full((2,), 3e7)})
    heard: list[str] = []
    places = {name: [torch.ones(info.shape)] for name, info in checkpoint.tensors.items()}
    checkpoint.fill(places, heard.append)
    assert not places["a.weight"][0].any() and len(heard) == 2
    with pytest.raises(CheckpointError, match="no tensor nope"):
        checkpoint.fill({"nope": [torch.ones(1)]})


def test_what_lies_on_the_host_is_checked_on_the_device_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name of the CPU stands for a GPU: an embedding's place is beside it."""
    monkeypatch.setattr(weight_stream, "ON_HOST_SLICE", 64)
    table = torch.randn(50, 7).to(torch.bfloat16)
    table[49, 6] = -1000
    spoilt = table.clone()
    spoilt[20, 3] = float("nan")
    checkpoint = checkpoint_with(tmp_path, {"table": table, "spoilt": spoilt, "half": table.half()})
    places = {name: [torch.zeros(50, 7, dtype=torch.bfloat16)] for name in checkpoint.tensors}
    found = weight_stream.fill(list(checkpoint.tensors.values()), places, torch.device("cpu", 0), size=100)
    assert {each.info.name: each.stored for each in found} == {"table": 1000.0, "spoilt": None, "half": 1000.0}
    assert torch.equal(places["table"][0], table) and torch.equal(places["half"][0], table)


def test_places_on_the_host_do_not_hide_the_device() -> None:
    host, device = torch.zeros(3), torch.zeros(3, device="meta")
    assert _device({"a": [host], "b": [device]}) == torch.device("meta")
    assert _device({"a": [host]}) == CPU and _device({}) is None
