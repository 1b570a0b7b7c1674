"""Products that join a checkpoint's matrices: one weight for each run of one format."""

from __future__ import annotations

from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig
from dflash_local.layout.attention import AttentionLayout
from dflash_local.layout.gated_delta_net import GatedDeltaNetLayout
from dflash_local.layout.linear import (
    INT8,
    UNQUANTIZED,
    Fp8Blocks,
    Int4Groups,
    LinearSpec,
    Part,
    WeightFormat,
    linear_buffers,
    segments,
    unquantized,
)

HEADS = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=8, gated=True, qk_norm=True)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=16, conv_kernel_size=4)


def test_parts_of_one_format_are_one_weight() -> None:
    qkv, output = AttentionLayout(HEADS).projections("layers.0.self_attn", 32)
    (buffer,) = linear_buffers(qkv, unquantized, "bfloat16", "target weights")
    assert buffer.shape == (2 * 4 * 8 + 2 * 2 * 8, 32) == (HEADS.qkv_size, 32)
    assert output.parts[0].module == "layers.0.self_attn.o_proj" and output.in_features == 4 * 8


def test_a_format_is_decided_for_each_part() -> None:
    """As checkpoints have it: b and a of Gated DeltaNet stay in 16 bits beside quantised q, k, v and z."""
    in_proj, _ = GatedDeltaNetLayout(DELTA).projections("layers.1.linear_attn", 32)

    def format_of(module: str) -> WeightFormat:
        return INT8 if module.endswith(("_qkv", "_z")) else UNQUANTIZED

    runs = segments(in_proj, format_of)
    assert [(run.format.name, [part.out_features for part in run.parts]) for run in runs] == [
        ("int8", [DELTA.conv_dim, DELTA.value_size]),
        ("unquantized", [4, 4]),
    ]
    buffers = list(linear_buffers(in_proj, format_of, "bfloat16", "target weights"))
    assert [(buffer.shape, buffer.dtype) for buffer in buffers] == [
        ((DELTA.conv_dim + DELTA.value_size, 32), "int8"),
        ((DELTA.conv_dim + DELTA.value_size,), "float32"),
        ((8, 32), "bfloat16"),
    ]
    assert len({buffer.name for buffer in buffers}) == 3


def test_parts_join_only_with_the_same_parameters() -> None:
    formats = {"a": Int4Groups(128), "b": Int4Groups(128), "c": Int4Groups(32), "d": Int4Groups(32, zeros=True)}
    product = LinearSpec("p", 256, tuple(Part(name, 16) for name in formats))
    runs = segments(product, formats.__getitem__)
    assert [[part.module for part in run.parts] for run in runs] == [["a", "b"], ["c"], ["d"]]
    sizes = [buffer.nbytes for buffer in linear_buffers(product, formats.__getitem__, "bfloat16", "target weights")]
    codes, coarse, fine = 16 * 256 // 2, 16 * 2 * 2, 16 * 8 * 2
    assert sizes == [2 * codes, 2 * coarse, codes, fine, codes, fine, 16 * 8]


def test_blocks_begin_with_the_rows_of_each_part() -> None:
    """A part whose rows end inside a block has its last scales for itself; what follows is another weight."""
    product = LinearSpec("p", 200, (Part("a", 256), Part("b", 100), Part("c", 60)))
    runs = segments(product, lambda _module: Fp8Blocks((128, 128)))
    assert [[part.module for part in run.parts] for run in runs] == [["a", "b"], ["c"]]
    buffers = list(linear_buffers(product, lambda _module: Fp8Blocks((128, 128)), "bfloat16", "target weights"))
    assert [buffer.shape for buffer in buffers] == [(356, 200), (3, 2), (60, 200), (1, 2)]
