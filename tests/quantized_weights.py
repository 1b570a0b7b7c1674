"""Random quantized weights whose codes, scales and zero points take every value."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import StoredGguf
from dflash_local.kernels.allocate import Tensors
from dflash_local.kernels.gguf_blocks import FLOAT16_AT
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, IntWeight
from dflash_local.layout.linear import GgufBlocks, MatrixPart, weight_format
from dflash_local.models.fused.gguf_formats import GGUF_BLOCKS, Kept
from dflash_local.models.place import Conversion

NOT_A_NUMBER = 127  # the code of fp8 whose sign makes the other one


def int4(
    n: int, k: int, group: int, zeros: bool = False, scales: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> IntWeight:
    """Scales of both signs, zero points from 0 to 16."""
    return _integers(4, n, k, group, 17 if zeros else 0, scales, device)


def int8(
    n: int, k: int, group: int, zeros: bool = False, scales: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> IntWeight:
    """Scales of both signs, every zero point."""
    return _integers(8, n, k, group, 256 if zeros else 0, scales, device)


def _integers(bits: int, n: int, k: int, group: int, zero_points: int, scales: torch.dtype, device: str) -> IntWeight:
    generator = torch.Generator(device).manual_seed(0)
    codes = _words(n, k * bits // 32, generator)
    values = torch.randn(n, k // group, generator=generator, device=device).to(scales)
    zeros = torch.randint(0, zero_points or 1, values.shape, generator=generator, device=device).to(torch.uint8)
    return IntWeight(codes, values, zeros if zero_points else None, torch.bfloat16, bits)


def _words(n: int, words: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (n, words), generator=generator, device=generator.device).to(torch.int32)


def fp8(
    n: int, k: int, block: tuple[int, int] = (128, 128), device: str = "cpu", scales: torch.dtype = torch.float32
) -> Fp8Weight:
    """Every code that is a number, with about as many large ones as small ones."""
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.randint(0, 256, (n, k), generator=generator, device=device).to(torch.uint8)
    codes[codes & NOT_A_NUMBER == NOT_A_NUMBER] = 0
    values = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=generator, device=device) + 0.5
    return Fp8Weight(codes.view(torch.float8_e4m3fn), values.to(scales), block, torch.bfloat16)


def fp8_rows(n: int, k: int, device: str = "cpu", scales: torch.dtype = torch.float32) -> Fp8Weight:
    """A scale for each row."""
    return fp8(n, k, (1, k), device, scales)


def mxfp4(n: int, k: int, device: str = "cpu", scales: tuple[int, int] = (110, 130)) -> Fp4Weight:
    """Scales from one power of two to another, which is not reached; the least and the largest occur."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randint(*scales, (n, k // 32), generator=generator, device=device).to(torch.uint8)
    values[0, 0], values[-1, -1] = scales[0], scales[1] - 1
    return Fp4Weight(_words(n, k // 8, generator), values, None, torch.bfloat16)


def nvfp4(n: int, k: int, row_scales: bool = True, device: str = "cpu") -> Fp4Weight:
    """Every scale that is a number and not negative."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randint(0, NOT_A_NUMBER, (n, k // 16), generator=generator, device=device).to(torch.uint8)
    rows = torch.rand(n, generator=generator, device=device) / 2688 if row_scales else None
    return Fp4Weight(_words(n, k // 8, generator), values.view(torch.float8_e4m3fn), rows, torch.bfloat16)


def gguf_blocks(dtype: str, n: int, k: int, device: str = "cpu", seed: int = 0, floats: float = 1.0) -> torch.Tensor:
    """Rows of blocks of any bytes, uint8 [n, bytes], but with floats of about that size and of both signs."""
    generator = torch.Generator(device).manual_seed(seed)
    weights, size = BLOCKS[dtype]
    count = n * k // weights
    blocks = torch.randint(0, 256, (count, size), generator=generator, device=device).to(torch.uint8)
    for at in FLOAT16_AT.get(dtype, ()):
        found = (torch.randn(count, 1, generator=generator, device=device) * floats).half()
        blocks[:, at : at + 2] = found.view(torch.uint8)
    if dtype == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 4 + 125 + round(math.log2(floats))
    return blocks.view(n, -1)


def gguf(dtype: str, n: int, k: int, device: str = "cpu") -> Kept:
    """A weight of one of GGUF's types as the engine reads it."""
    form = weight_format(StoredGguf(dtype))
    assert isinstance(form, GgufBlocks)
    buffers = form.buffers("w", n, k, "bfloat16", "target weights")
    tensors = Tensors([replace(each, room=None) for each in buffers], torch.device(device)).take(buffers)
    weight = GGUF_BLOCKS.weight(form, tensors, torch.bfloat16)
    (place,) = GGUF_BLOCKS.places(weight, form, [MatrixPart("w", n)]).values()
    assert isinstance(place, Conversion)
    place.take(gguf_blocks(dtype, n, k, device))
    return weight
