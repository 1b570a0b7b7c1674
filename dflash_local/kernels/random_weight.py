"""Random weights in a format of ``fragment_packing``, for trying its kernels without a checkpoint."""

from __future__ import annotations

import torch

from dflash_local.config.quantization import SUPER_BLOCK
from dflash_local.kernels.fragment_packing import PLAIN, Codable, FragmentFormat, FragmentWeight, is_whole
from dflash_local.kernels.quantized_weight import Fp4Weight, Fp8Weight, GgufWeight, IntWeight
from dflash_local.layout.linear import WORD_BITS

NOT_A_NUMBER = 0x7F  # the code of e4m3 whose other sign is another one
# About the root mean square of random codes, as what they stand for.
SPREAD = {"int4": 4.6, "int5": 9.2, "int6": 18.5, "int8": 74.0, "e4m3": 128.0, "e2m1": 2.9, "iq4": 66.0}
BYTES = {torch.uint8: (1, 64, 37.0), torch.int8: (-100, 101, 58.0)}  # of scales: from, to, root mean square
E8M0_OFFSET, E4M3_MIDDLE = 127, 128.0


def random_weight(kind: FragmentFormat, shape: tuple[int, int], device: torch.device) -> FragmentWeight:
    """Draw every code, scales of both signs where a format has them, for results of about one."""
    n, k = shape
    generator = torch.Generator(device).manual_seed(0)
    if kind == PLAIN:
        return FragmentWeight.plain(torch.randn(shape, generator=generator, device=device).mul_(k**-0.5).bfloat16())
    weight = random_coded(kind, (n - kind.tail, k), generator)
    packed = FragmentWeight.of(weight, in_place=is_whole(weight))
    if not kind.tail:
        return packed
    return packed.with_tail((torch.randn(kind.tail, k, generator=generator, device=device) * k**-0.5).bfloat16())


def random_coded(kind: FragmentFormat, shape: tuple[int, int], generator: torch.Generator) -> Codable:
    """Draw the coded part of some shape before it is packed, on the generator's device."""
    n, k = shape
    device, size = generator.device, k**-0.5 / SPREAD[kind.codes]
    block = kind.block or (1, k)
    groups = -(-n // block[0]), -(-k // block[1])

    def scales(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator, device=device) + 0.5

    if kind.codes == "e4m3":
        codes = torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)
        codes.masked_fill_(codes & NOT_A_NUMBER == NOT_A_NUMBER, 0)
        blocks = (scales(*groups) * size).to(kind.scales)
        return Fp8Weight(codes.view(torch.float8_e4m3fn), blocks, block, torch.bfloat16)
    words = torch.randint(
        -(2**31), 2**31, (n, k * kind.bits // WORD_BITS), generator=generator, device=device, dtype=torch.int32
    )
    if kind.codes == "e2m1":
        if kind.scales == torch.uint8:
            powers = torch.log2(scales(*groups) * size).round() + E8M0_OFFSET
            powers -= torch.randint(0, 4, groups, generator=generator, device=device)
            return Fp4Weight(words, powers.to(torch.uint8), None, torch.bfloat16)
        rows = scales(n) * (size / E4M3_MIDDLE) if kind.row_scales else None
        small = scales(*groups) * (E4M3_MIDDLE if kind.row_scales else size)
        return Fp4Weight(words, small.to(torch.float8_e4m3fn), rows, torch.bfloat16)
    if kind.of_gguf:
        return _random_gguf(kind, words, groups, size, generator)
    signs = torch.randint(0, 2, groups, generator=generator, device=device) * 2 - 1
    middle = 2 ** (kind.bits - 1)
    zeros = torch.randint(middle - 8, middle + 9, groups, generator=generator, device=device).to(torch.uint8)
    values = (scales(*groups) * signs * size).to(kind.scales)
    return IntWeight(words, values, zeros if kind.zeros else None, torch.bfloat16, kind.bits)


def _random_gguf(
    kind: FragmentFormat, words: torch.Tensor, groups: tuple[int, int], size: float, generator: torch.Generator
) -> GgufWeight:
    """Draw blocks whose minima are about as far below zero as the middle code is above."""
    device, middle = words.device, 2.0 ** (kind.bits - 1)

    def around(value: float, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=generator, device=device) + 0.5) * value

    signs = torch.randint(0, 2, groups, generator=generator, device=device) * 2 - 1
    scales, minima, factors = around(size, *groups) * signs, None, None
    if kind.minima:
        minima = -scales * around(middle, *groups)
    if kind.nested:
        low, high, spread = BYTES[kind.scales]
        blocks = groups[0], groups[1] * (kind.block or (1, 1))[1] // SUPER_BLOCK
        factor = around(size / spread, *blocks)
        scales = torch.randint(low, high, groups, generator=generator, device=device)
        if kind.minima:
            minima = torch.randint(low, high, groups, generator=generator, device=device)
        factors = torch.stack((factor, factor * middle)[: kind.factors], 2).flatten(1).half()
    minima = None if minima is None else minima.to(kind.scales)
    return GgufWeight(words, scales.to(kind.scales), minima, factors, torch.bfloat16, kind.bits, kind.codes == "iq4")
