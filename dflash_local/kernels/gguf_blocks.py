"""Weights of GGUF files out of their blocks, in plain torch, bit for bit as ggml computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.kernels.gguf_codes import (
    fields,
    five_bits,
    float16_at,
    iq4_xs_scales,
    q5_k_codes,
    q6_k_codes,
    six_bits,
)
from dflash_local.kernels.quantized_weight import IQ4

CHUNK = 2**18  # weights that a CPU decodes at once: temporaries of some 100 KB stay in its cache
CARD_CHUNK = 2**24  # and a card, which takes microseconds to start on each
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, as ggml has them


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
    return float16_at(blocks, start).float()


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (fields(blocks[:, 2:], 16, 4).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * fields(blocks[:, 4:], 16, 4) + _float16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (five_bits(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * five_bits(blocks[:, 4:8], blocks[:, 8:]) + _float16(blocks, 2)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a block's eight groups, float32 [blocks, 8, 1] each."""
    scales, minima = six_bits(blocks)
    return (_float16(blocks, 0) * scales).unsqueeze(2), (_float16(blocks, 2) * minima).unsqueeze(2)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return (scales * fields(blocks[:, 16:], 32, 4).unflatten(1, (8, 32)) - minima).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return (scales * q5_k_codes(blocks).unflatten(1, (8, 32)) - minima).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _float16(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return (scales.unsqueeze(2) * (q6_k_codes(blocks).float() - 32).unflatten(1, (16, 16))).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponents = blocks[:, :1].int()
    # Half of 2 ** (exponent - 127), for twice the values; the two smallest are subnormal.
    halves = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23).view(torch.float32)
    return halves * _looked_up(E2M1, fields(blocks[:, 1:], 16, 4))


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _looked_up(IQ4, fields(blocks[:, 2:], 16, 4))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = _float16(blocks, 0) * iq4_xs_scales(blocks)
    return (scales.unsqueeze(2) * _looked_up(IQ4, fields(blocks[:, 8:], 16, 4)).unflatten(1, (8, 32))).flatten(1)


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
