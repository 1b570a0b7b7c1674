"""Layouts of quantized weights that no dialect of ``quantized_checkpoints`` has, and what is refused of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_local.config.quantization import WHOLE, StoredFormat, StoredFp4, StoredFp8, StoredInt
from dflash_local.errors import CheckpointError
from dflash_local.kernels.allocate import Tensors
from dflash_local.layout.linear import MatrixPart, weight_format
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fill_places import fill_places
from dflash_local.models.fused.formats import FORMATS
from dflash_local.models.fused.quantized_formats import decode
from tests.quantized_checkpoints import BRAIN, DIALECTS, FULL, Encoded, Grid, fp8, gptq, pack_quantized

CPU = torch.device("cpu")
ROWS, COLUMNS, GROUP = 32, 128, 32
WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
Stored = Mapping[str, torch.Tensor]


def with_one_scale() -> Encoded:
    """Bytes of int8 with a scale for the whole matrix."""
    scale = WEIGHT.abs().max() / 127
    codes = (WEIGHT / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale.reshape(1)}, codes.float() * scale


def of_groups(grid: Grid, layout: str) -> Encoded:
    matrix = grid.quantized(WEIGHT)
    return gptq(matrix, grid, 0) if layout == "gptq_v2" else pack_quantized(matrix, grid), matrix.weight


def with_four_axes() -> Encoded:
    """Scales [rows, 1, columns, 1], as some files have those of blocks."""
    stored, meant = fp8(WEIGHT, (8, 32), FULL, "weight_scale")
    return {**stored, "weight_scale": stored["weight_scale"][:, None, :, None]}, meant


OTHERS: dict[str, tuple[StoredFormat, Encoded]] = {
    "gptq_v2 8 rows": (StoredInt("gptq_v2", WHOLE, True, 8), of_groups(Grid(8, 0, symmetric=False), "gptq_v2")),
    "pack-quantized rows": (StoredInt("pack-quantized", WHOLE), of_groups(Grid(group=0), "pack-quantized")),
    "negative scales": (StoredInt("pack-quantized", GROUP), of_groups(Grid(negative=True), "pack-quantized")),
    "int-quantized tensor": (StoredInt("int-quantized", WHOLE, bits=8), with_one_scale()),
    "fp8 with axes of one": (StoredFp8((8, 32)), with_four_axes()),
    "fp8 groups": (StoredFp8((1, 32)), fp8(WEIGHT, (1, 32), BRAIN, "weight_scale")),
}


def read(stored: StoredFormat, tensors: Stored, folder: Path) -> torch.Tensor:
    """What the reader makes of a matrix."""
    (folder / "config.json").write_text(json.dumps({}))
    named = {f"a.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / "model.safetensors")
    form = weight_format(stored, "float32", next(name for name in stored.scale_names if name in tensors))
    kind = FORMATS[type(form)]
    buffers = form.buffers("p", ROWS, COLUMNS, "float32", "target weights")
    weight = kind.weight(form, Tensors(buffers, CPU).take(buffers), torch.float32)
    fill_places(Checkpoint.open(folder), named, kind.places(weight, form, [MatrixPart("a", ROWS)]))
    return decode(weight, torch.empty(ROWS, COLUMNS))


@pytest.mark.parametrize("name", OTHERS)
def test_a_matrix_is_what_its_layout_says(name: str, tmp_path: Path) -> None:
    stored, (tensors, meant) = OTHERS[name]
    assert torch.allclose(read(stored, tensors, tmp_path), meant, rtol=1e-6, atol=0)


CHANNEL = StoredFp8((1, WHOLE))


@pytest.mark.parametrize(
    ("stored", "dialect", "changes", "said"),
    [
        (StoredFp4("nvfp4-pack-quantized"), "nvfp4_pack_quantized", {"weight_global_scale": torch.zeros(1)}, "is zero"),
        (StoredFp4("nvfp4"), "modelopt_nvfp4", {"weight_scale_2": torch.ones(2)}, r"shape \[2\], expected \[1\]"),
        (
            StoredFp4("mxfp4-pack-quantized"),
            "mxfp4_pack_quantized",
            {"weight_scale": torch.full((ROWS, 4), 255)},
            "NaN",
        ),
        (CHANNEL, "float_quantized_channel", {"weight_scale": torch.ones(7)}, r"shape \[7\], expected \[32, 1\]"),
        (StoredInt("int-quantized", WHOLE, bits=8), "int_quantized", {"weight": WEIGHT}, "F32, expected torch.int8"),
        (StoredInt("gptq", GROUP), "gptq", {"g_idx": torch.arange(COLUMNS).int() % 4}, "g_idx scatters the groups"),
        (StoredInt("gptq", WHOLE), "gptq_rows", {"g_idx": torch.arange(COLUMNS).int() // 64}, "g_idx scatters"),
        (
            StoredInt("pack-quantized", GROUP),
            "pack_quantized",
            {"weight_g_idx": torch.arange(9)},
            "not know: a.weight_g",
        ),
        (StoredFp4("nvfp4"), "modelopt_nvfp4", {"pre_quant_scale": torch.ones(COLUMNS)}, "not know: a.pre_quant_scale"),
    ],
)
def test_what_does_not_belong_is_named(
    stored: StoredFormat, dialect: str, changes: Stored, said: str, tmp_path: Path
) -> None:
    tensors, _ = DIALECTS[dialect].encode(WEIGHT)
    changed = {name: each.to(tensors[name].dtype) if said == "NaN" else each for name, each in changes.items()}
    with pytest.raises(CheckpointError, match=said) as caught:
        read(stored, {**tensors, **changed}, tmp_path)
    assert f"a.{next(iter(changes))}" in caught.value.message


@pytest.mark.parametrize("stored", [StoredInt("gptq", GROUP), StoredInt("awq", GROUP, True), StoredFp4("nvfp4")])
def test_groups_that_do_not_divide_a_matrix_are_refused_by_its_name(stored: StoredFormat) -> None:
    form = weight_format(stored)
    kind = FORMATS[type(form)]
    buffers = form.buffers("p", ROWS, 72, "float32", "target weights")
    weight = kind.weight(form, Tensors(buffers, CPU).take(buffers), torch.float32)
    with pytest.raises(CheckpointError, match="^a.q_proj: groups of (16|32) do not divide a matrix of about 72 inputs"):
        kind.places(weight, form, [MatrixPart("a.q_proj", ROWS)])
