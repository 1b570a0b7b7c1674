"""Blocks of GGUF files against the gguf library: every type, every code, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from dflash_local.checkpoint_files.tensor_info import BLOCKS, GGML_TYPES, UNREAD
from dflash_local.kernels.gguf_blocks import DECODERS, decode_blocks

SHAPE = (3, 2, 1024)  # weights


def oracle(data: np.ndarray, dtype: str) -> torch.Tensor:
    with np.errstate(all="ignore"):  # scales of random bytes may be infinite or NaN
        return torch.from_numpy(np.ascontiguousarray(quants.dequantize(data, GGMLQuantizationType[dtype])))


def check_equal(decoded: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits; a NaN may be any NaN."""
    assert decoded.dtype == expected.dtype == torch.float32 and decoded.shape == expected.shape
    assert torch.equal(decoded.isnan(), expected.isnan())
    quiet = expected.isnan()
    assert torch.equal(
        decoded.masked_fill(quiet, 0).view(torch.int32), expected.masked_fill(quiet, 0).view(torch.int32)
    )


def random_bytes(dtype: str, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    weights, size = BLOCKS[dtype]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // weights * size), dtype=np.uint8)


def test_every_type_that_is_read_is_decoded() -> None:
    plain = {"I8", "I16", "I32", "I64", "F64"}  # in both formats, and no weights
    assert set(DECODERS) == set(GGML_TYPES.values()) - set(UNREAD) - plain


@pytest.mark.parametrize("dtype", DECODERS)
def test_every_byte_at_every_place(dtype: str) -> None:
    """256 blocks for each byte of a block, the others as they were."""
    weights, size = BLOCKS[dtype]
    block = random_bytes(dtype, (weights,), seed=1)
    data = np.tile(block, (size, 256, 1))
    for place in range(size):
        data[place, :, place] = np.arange(256)
    check_equal(decode_blocks(torch.from_numpy(data), dtype), oracle(data, dtype))
