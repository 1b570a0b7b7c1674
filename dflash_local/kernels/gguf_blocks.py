"""Weights of GGUF files out of their blocks, in plain torch, bit for bit as ggml computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS

CHUNK = 2**18  # weights that a CPU decodes at once: temporaries of some 100 KB stay in its cache
CARD_CHUNK = 2**24  # and a card, which takes microseconds to start on each
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, as ggml has them
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode_blocks(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """The weights of rows of blocks.

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


def _float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(codes: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Numbers of ``bits`` bits, uint8 [blocks, n]: of each ``run`` bytes first the lowest bits, then the next ones.

    Eight bytes are taken apart at once. A shift fills the upper end with copies of the sign, which the mask takes away.
    """
    words = codes.contiguous().view(torch.int64).unflatten(1, (-1, run // 8))
    mask = ((1 << bits) - 1) * 0x0101010101010101
    return torch.stack([words >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1).view(torch.uint8)


def _fields_by_byte(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """As ``_fields``, of each byte for itself."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (_fields(blocks[:, 2:], 16, 4).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _fields(blocks[:, 4:], 16, 4) + _float16(blocks, 2)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Codes of 32 weights whose fifth bits stand in four bytes of their own, weight after weight."""
    return _fields(low, 16, 4) | _fields_by_byte(high, 1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _float16(blocks, 2)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a block's eight groups, float32 [blocks, 8, 1] each.

    Twelve bytes hold six bits of each: scales 0 to 3 and minima 0 to 3 in the low bits of bytes 0 to 3 and 4 to 7;
    scales and minima 4 to 7 in the halves of bytes 8 to 11, their two highest bits above those of the first.
    """
    scales, minima, halves = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 63, halves & 15 | scales >> 6 << 4), 1)
    minima = torch.cat((minima & 63, halves >> 4 | minima >> 6 << 4), 1)
    return (_float16(blocks, 0) * scales).unsqueeze(2), (_float16(blocks, 2) * minima).unsqueeze(2)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return (scales * _fields(blocks[:, 16:], 32, 4).unflatten(1, (8, 32)) - minima).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << 4
    return (scales * codes.unflatten(1, (8, 32)) - minima).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _float16(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    codes = _fields(blocks[:, :128], 64, 4) | _fields(blocks[:, 128:192], 32, 2) << 4
    return (scales.unsqueeze(2) * (codes.float() - 32).unflatten(1, (16, 16))).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int()
    # Half of 2 ** (exponent - 127), for twice the values; the two smallest are subnormal.
    halves = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23).view(torch.float32)
    return halves * _looked_up(E2M1, _fields(blocks[:, 1:], 16, 4))


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _looked_up(IQ4, _fields(blocks[:, 2:], 16, 4))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = _fields_by_byte(blocks[:, 4:8], 4) | _fields_by_byte(blocks[:, 2:4], 2) << 4
    scales = _float16(blocks, 0) * (scales.float() - 32)
    return (scales.unsqueeze(2) * _looked_up(IQ4, _fields(blocks[:, 8:], 16, 4)).unflatten(1, (8, 32))).flatten(1)


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
