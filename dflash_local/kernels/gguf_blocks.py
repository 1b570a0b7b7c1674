"""Weights of GGUF files out of their blocks, in plain torch, bit for bit as ggml computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels.quantized_weight import IQ4

CHUNK = 2**18  # weights that a CPU decodes at once: temporaries of some 100 KB stay in its cache
CARD_CHUNK = 2**24  # and a card, which takes microseconds to start on each
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, as ggml has them


def decode_blocks(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Decode rows of blocks.

    Args:
        data: uint8 [..., bytes of a row], anywhere. dtype: of a file's header, one of ``DECODERS``.

    Returns:
        float32 [..., weights of a row]; beside it and ``data``, temporaries for one chunk are held.
    """
    weights, size = BLOCKS[dtype]
    blocks = data.reshape(-1, size)
    decoded = torch.empty((len(blocks), weights), dtype=torch.float32, device=data.device)
    step = (CHUNK if data.device.type == "cpu" else CARD_CHUNK) // weights
    for start in range(0, len(blocks), step):
        decoded[start : start + step] = DECODERS[dtype](blocks[start : start + step])
    return decoded.view(*data.shape[:-1], -1)


def _numbers(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return blocks.contiguous().view(dtype).float()


def _decoded(blocks: torch.Tensor, dtype: str) -> torch.Tensor:
    """Compute ``(code - zero) * scale + minimum`` in ggml's order, or look the code up: float32 [n, W]."""
    kept, (codes, scales, minima, factors) = GGUF_TYPES[dtype], parts_of(blocks, dtype)
    scales, minima = scales.float(), None if minima is None else minima.float()
    if factors is not None:
        scales = factors[:, :1].float() * scales
        minima = None if minima is None else -factors[:, 1:].float() * minima
    if kept.coding == "iq4":
        codes = _looked_up(IQ4, codes)
    elif minima is None:
        codes = codes.float().sub_(2 ** (kept.bits - 1))
    grouped = codes.view(*scales.shape, -1) * scales.unsqueeze(2)
    return (grouped if minima is None else grouped.add_(minima.unsqueeze(2))).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int()
    # Half of 2 ** (exponent - 127), for twice the values; the two smallest are subnormal.
    halves = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23).view(torch.float32)
    return halves * _looked_up(E2M1, fields(blocks[:, 1:], 16, 4))


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{dtype: partial(_decoded, dtype=dtype) for dtype in GGUF_TYPES},
    "F32": partial(_numbers, dtype=torch.float32),
    "F16": partial(_numbers, dtype=torch.float16),
    "BF16": partial(_numbers, dtype=torch.bfloat16),
    "MXFP4": _mxfp4,
}


E8M0_NAN = 255
FLIP = 0x80  # a signed byte's sign, flipped, makes it a code from 0 up
# Where a block's float16 numbers begin; an exponent of MXFP4 is a byte.
FLOAT16_AT: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


class BlockParts(NamedTuple):
    """Hold the parts of n blocks of W weights in G groups.

    Attributes:
        codes: uint8 [n, W], from 0 up. scales: [n, G], float16, or bytes (int8, uint8). minima: as the scales, or None.
        factors: float16 [n, 1 or 2] that bytes of scales, and of minima, are multiplied with; None where there are no
            such bytes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def parts_of(blocks: torch.Tensor, dtype: str) -> BlockParts:
    """Take apart blocks uint8 [n, bytes of one] of a type in ``config.quantization.GGUF_TYPES``."""
    return _PARTS[dtype](blocks)


def stored_floats(blocks: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the floats in blocks [n, bytes of one], [n, 1 or 2]: where they are finite, so are all weights."""
    if dtype == "MXFP4":
        exponents = blocks[:, :1]
        return torch.where(exponents == E8M0_NAN, torch.nan, torch.exp2(exponents.float() - 127))
    return torch.cat([float16_at(blocks, start) for start in FLOAT16_AT[dtype]], 1)


def float16_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte ``start`` of each block, [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def fields(codes: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Take apart numbers of ``bits`` bits, uint8 [n, numbers]: of each ``run`` bytes the lowest bits come first.

    Eight bytes are taken apart at once. A shift fills the upper end with copies of the sign, which the mask takes away.
    """
    words = codes.contiguous().view(torch.int64).unflatten(1, (-1, run // 8))
    mask = ((1 << bits) - 1) * 0x0101010101010101
    return torch.stack([words >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1).view(torch.uint8)


def fields_by_byte(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Take apart numbers as ``fields``, of each byte for itself."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


def five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return codes of 32 weights whose fifth bits stand in four bytes of their own, weight after weight."""
    return fields(low, 16, 4) | fields_by_byte(high, 1) << 4


def q5_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    return fields(blocks[:, 48:], 32, 4) | fields(blocks[:, 16:48], 32, 1) << 4


def q6_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    return fields(blocks[:, :128], 64, 4) | fields(blocks[:, 128:192], 32, 2) << 4


def six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima of the eight groups of Q4_K and Q5_K, uint8 [n, 8] each.

    Twelve bytes hold six bits of each: scales 0 to 3 and minima 0 to 3 in the low bits of bytes 0 to 3 and 4 to 7;
    scales and minima 4 to 7 in the halves of bytes 8 to 11, their two highest bits above those of the first.
    """
    scales, minima, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 63, halves & 15 | scales >> 6 << 4), 1)
    return scales, torch.cat((minima & 63, halves >> 4 | minima >> 6 << 4), 1)


def iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Return scales of the eight groups, int8 [n, 8]."""
    return (fields_by_byte(blocks[:, 4:8], 4) | fields_by_byte(blocks[:, 2:4], 2) << 4).view(torch.int8) - 32


def _k_parts(blocks: torch.Tensor, codes: torch.Tensor) -> BlockParts:
    factors = torch.cat((float16_at(blocks, 0), float16_at(blocks, 2)), 1)
    return BlockParts(codes, *six_bits(blocks), factors)


_PARTS: Mapping[str, Callable[[torch.Tensor], BlockParts]] = {
    "Q4_0": lambda blocks: BlockParts(fields(blocks[:, 2:], 16, 4), float16_at(blocks, 0)),
    "Q4_1": lambda blocks: BlockParts(fields(blocks[:, 4:], 16, 4), float16_at(blocks, 0), float16_at(blocks, 2)),
    "Q5_0": lambda blocks: BlockParts(five_bits(blocks[:, 2:6], blocks[:, 6:]), float16_at(blocks, 0)),
    "Q5_1": lambda blocks: BlockParts(
        five_bits(blocks[:, 4:8], blocks[:, 8:]), float16_at(blocks, 0), float16_at(blocks, 2)
    ),
    "Q8_0": lambda blocks: BlockParts(blocks[:, 2:] ^ FLIP, float16_at(blocks, 0)),
    "Q4_K": lambda blocks: _k_parts(blocks, fields(blocks[:, 16:], 32, 4)),
    "Q5_K": lambda blocks: _k_parts(blocks, q5_k_codes(blocks)),
    "Q6_K": lambda blocks: BlockParts(
        q6_k_codes(blocks), blocks[:, 192:208].view(torch.int8), None, float16_at(blocks, 208)
    ),
    "IQ4_NL": lambda blocks: BlockParts(fields(blocks[:, 2:], 16, 4), float16_at(blocks, 0)),
    "IQ4_XS": lambda blocks: BlockParts(
        fields(blocks[:, 8:], 16, 4), iq4_xs_scales(blocks), None, float16_at(blocks, 0)
    ),
    "MXFP4": lambda blocks: BlockParts(fields(blocks[:, 1:], 16, 4), blocks[:, :1]),
}
