"""What lies in GGUF blocks: codes, scales and minima of each type, taken apart without losing a bit, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

E8M0_NAN = 255
FLIP = 0x80  # a signed byte's sign, flipped, makes it a code from 0 up
# Where a block's float16 numbers begin; an exponent of MXFP4 is a byte.
FLOAT16_AT: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


class BlockParts(NamedTuple):
    """Of n blocks of W weights in G groups.

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
    """Blocks uint8 [n, bytes of one] of a type in ``config.quantization.GGUF_TYPES``."""
    return _PARTS[dtype](blocks)


def stored_floats(blocks: torch.Tensor, dtype: str) -> torch.Tensor:
    """The floats in blocks [n, bytes of one], [n, 1 or 2]: where they are finite, so are all weights."""
    if dtype == "MXFP4":
        exponents = blocks[:, :1]
        return torch.where(exponents == E8M0_NAN, torch.nan, torch.exp2(exponents.float() - 127))
    return torch.cat([float16_at(blocks, start) for start in FLOAT16_AT[dtype]], 1)


def float16_at(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of each block, [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def fields(codes: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Numbers of ``bits`` bits, uint8 [n, numbers]: of each ``run`` bytes first the lowest bits, then the next ones.

    Eight bytes are taken apart at once. A shift fills the upper end with copies of the sign, which the mask takes away.
    """
    words = codes.contiguous().view(torch.int64).unflatten(1, (-1, run // 8))
    mask = ((1 << bits) - 1) * 0x0101010101010101
    return torch.stack([words >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1).view(torch.uint8)


def fields_by_byte(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """As ``fields``, of each byte for itself."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


def five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Codes of 32 weights whose fifth bits stand in four bytes of their own, weight after weight."""
    return fields(low, 16, 4) | fields_by_byte(high, 1) << 4


def q5_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    return fields(blocks[:, 48:], 32, 4) | fields(blocks[:, 16:48], 32, 1) << 4


def q6_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    return fields(blocks[:, :128], 64, 4) | fields(blocks[:, 128:192], 32, 2) << 4


def six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the eight groups of Q4_K and Q5_K, uint8 [n, 8] each.

    Twelve bytes hold six bits of each: scales 0 to 3 and minima 0 to 3 in the low bits of bytes 0 to 3 and 4 to 7;
    scales and minima 4 to 7 in the halves of bytes 8 to 11, their two highest bits above those of the first.
    """
    scales, minima, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 63, halves & 15 | scales >> 6 << 4), 1)
    return scales, torch.cat((minima & 63, halves >> 4 | minima >> 6 << 4), 1)


def iq4_xs_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Of the eight groups, int8 [n, 8]."""
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
