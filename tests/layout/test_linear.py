"""Products that join a checkpoint's matrices: one weight for each run of one format."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.config.quantization import WHOLE, StoredFormat, StoredFp8, StoredInt
from dflash_local.layout.gated_delta_net import GatedDeltaNetLayout
from dflash_local.layout.linear import (
    UNQUANTIZED,
    LinearSpec,
    MatrixPart,
    WeightFormat,
    linear_buffers,
    segments,
    weight_format,
)

DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=16, conv_kernel_size=4)


def test_a_format_is_decided_for_each_part() -> None:
    """As checkpoints have it: b and a of Gated DeltaNet stay in 16 bits beside quantized q, k, v and z."""
    in_proj, _ = GatedDeltaNetLayout(DELTA).projections("layers.1.linear_attn", 32)

    coded = weight_format(StoredInt("pack-quantized", WHOLE, bits=8))

    def format_of(module: str) -> WeightFormat:
        return coded if module.endswith(("_qkv", "_z")) else UNQUANTIZED

    runs = segments(in_proj, format_of)
    assert [(run.format.name, [part.out_features for part in run.parts]) for run in runs] == [
        ("int8 per channel", [DELTA.conv_dim, DELTA.value_size]),
        ("unquantized", [4, 4]),
    ]
    buffers = list(linear_buffers(in_proj, format_of, "bfloat16", "target weights"))
    assert [(buffer.shape, buffer.dtype) for buffer in buffers] == [
        ((DELTA.conv_dim + DELTA.value_size, 8), "int32"),
        ((DELTA.conv_dim + DELTA.value_size, 1), "float32"),
        ((8, 32), "bfloat16"),
    ]
    assert len({buffer.name for buffer in buffers}) == 3


def sizes(stored: StoredFormat, rows: int, columns: int) -> list[tuple[tuple[int, ...], str]]:
    buffers = weight_format(stored).buffers("p", rows, columns, "bfloat16", "target weights")
    return [(buffer.shape, buffer.dtype) for buffer in buffers]


def test_parts_join_only_with_the_same_parameters() -> None:
    coarse, fine = StoredInt("pack-quantized", 128), StoredInt("pack-quantized", 32)
    stored = {"a": coarse, "b": coarse, "c": fine, "d": replace(fine, zeros=True), "e": replace(fine, bits=8)}
    formats = {name: weight_format(each) for name, each in stored.items()}
    product = LinearSpec("p", 256, tuple(MatrixPart(name, 16) for name in formats))
    runs = segments(product, formats.__getitem__)
    assert [[part.module for part in run.parts] for run in runs] == [["a", "b"], ["c"], ["d"], ["e"]]
    found = [buffer.nbytes for buffer in linear_buffers(product, formats.__getitem__, "bfloat16", "target weights")]
    codes, per_128, per_32 = 16 * 256 // 2, 16 * 2 * 2, 16 * 8 * 2
    assert found == [2 * codes, 2 * per_128, codes, per_32, codes, per_32, 16 * 8, 2 * codes, per_32]


def test_blocks_begin_with_the_rows_of_each_part() -> None:
    """A part whose rows end inside a block has its last scales for itself; what follows is another weight."""
    product = LinearSpec("p", 200, (MatrixPart("a", 256), MatrixPart("b", 100), MatrixPart("c", 60)))
    blocks = weight_format(StoredFp8((128, 128)))
    runs = segments(product, lambda _module: blocks)
    assert [[part.module for part in run.parts] for run in runs] == [["a", "b"], ["c"]]
    buffers = list(linear_buffers(product, lambda _module: blocks, "bfloat16", "target weights"))
    assert [buffer.shape for buffer in buffers] == [(356, 200), (3, 2), (60, 200), (1, 2)]


@pytest.mark.parametrize("stored", [StoredFp8((1, WHOLE)), StoredFp8((WHOLE, WHOLE)), StoredInt("gptq", WHOLE, bits=8)])
def test_a_scale_for_a_matrix_or_a_row_is_kept_for_each_row(stored: StoredFormat) -> None:
    """So that matrices with scales of their own join in one weight, whatever rows they have."""
    product = LinearSpec("p", 96, (MatrixPart("q", 48), MatrixPart("k", 7), MatrixPart("v", 7)))
    (run,) = segments(product, lambda _module: weight_format(stored))
    assert [buffer.shape for buffer in run.buffers(96, "bfloat16", "target weights")][1] == (62, 1)
    assert sizes(stored, 62, 96)[1] == ((62, 1), "float32")
