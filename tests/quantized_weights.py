"""Random quantised weights whose codes, scales and zero points take every value."""

from __future__ import annotations

import torch

from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight

NOT_A_NUMBER = 127  # the code of fp8 whose sign makes the other one


def int4(
    n: int, k: int, group: int, zeros: bool = False, scales: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> IntWeight:
    """Scales of both signs, zero points from 0 to 16."""
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator, device=device).to(torch.int32)
    values = torch.randn(n, k // group, generator=generator, device=device).to(scales)
    points = torch.randint(0, 17, values.shape, generator=generator, device=device).to(torch.uint8)
    return IntWeight(codes, values, points if zeros else None, torch.bfloat16)


def fp8(n: int, k: int, block: tuple[int, int] = (128, 128), device: str = "cpu") -> Fp8Weight:
    """Every code that is a number, with about as many large ones as small ones."""
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.randint(0, 256, (n, k), generator=generator, device=device).to(torch.uint8)
    codes[codes & NOT_A_NUMBER == NOT_A_NUMBER] = 0
    scales = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=generator, device=device) + 0.5
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scales, block, torch.bfloat16)
