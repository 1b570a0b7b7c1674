"""Random weights in a format of ``fragment_packing``, for trying its kernels without a checkpoint."""

from __future__ import annotations

import torch

from dflash_local.kernels.fragment_packing import MAX_ZERO, FragmentFormat, FragmentWeight, is_whole
from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight

NOT_A_NUMBER = 0x7F  # the code of e4m3 whose other sign is another one


def random_weight(kind: FragmentFormat, shape: tuple[int, int], device: torch.device) -> FragmentWeight:
    """Of every code, scales of both signs where a format has them, and results of about one."""
    n, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def scales(*sizes: int, signed: bool) -> torch.Tensor:
        found = torch.rand(sizes, generator=generator, device=device) + 0.5
        if signed:
            found *= torch.randint(0, 2, sizes, generator=generator, device=device) * 2 - 1
        return found

    if kind.bits == 8:
        codes = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
        codes.masked_fill_(codes & NOT_A_NUMBER == NOT_A_NUMBER, 0)
        blocks = scales(-(-n // kind.block[0]), -(-k // kind.block[1]), signed=False) * (k**-0.5 / 128)
        stored = codes.view(torch.float8_e4m3fn)
        weight: IntWeight | Fp8Weight = Fp8Weight(stored, blocks.to(kind.scales), kind.block, torch.bfloat16)
    else:
        words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator, device=device, dtype=torch.int32)
        groups = scales(n, k // kind.block[1], signed=True) * (k**-0.5 / 4.6)
        zeros = torch.randint(0, min(17, MAX_ZERO), groups.shape, generator=generator, device=device).to(torch.uint8)
        weight = IntWeight(words, groups.to(kind.scales), zeros if kind.zeros else None, torch.bfloat16)
    return FragmentWeight.of(weight, in_place=is_whole(weight))
