"""What the few-row kernels multiply: formats of weights, and rows."""

from __future__ import annotations

import torch

from dflash_local.kernels.fragment_packing import PLAIN, FragmentFormat

BF16, BYTES = torch.bfloat16, torch.uint8
FORMATS = {
    "bfloat16": PLAIN,
    "int4": FragmentFormat("int4", (1, 128), False, BF16),
    "int4, groups of 32 with zeros": FragmentFormat("int4", (1, 32), True, BF16),
    "int8, groups of 128 with zeros": FragmentFormat("int8", (1, 128), True, BF16),
    "int8, rows": FragmentFormat("int8", None, False, torch.float32),
    "fp8": FragmentFormat("e4m3", (128, 128), False, BF16),
    "fp8, rows": FragmentFormat("e4m3", None, False, torch.float32),
    "MXFP4": FragmentFormat("e2m1", (1, 32), False, BYTES),
    "NVFP4": FragmentFormat("e2m1", (1, 16), False, torch.float8_e4m3fn, row_scales=True),
    "Q4_1": FragmentFormat("int4", (1, 32), False, torch.float16, minima=True),
    "Q5_1": FragmentFormat("int5", (1, 32), False, torch.float16, minima=True),
    "Q4_K": FragmentFormat("int4", (1, 32), False, BYTES, minima=True),
    "Q5_K": FragmentFormat("int5", (1, 32), False, BYTES, minima=True),
    "Q6_K": FragmentFormat("int6", (1, 16), False, torch.int8),
    "IQ4_XS": FragmentFormat("iq4", (1, 32), False, torch.int8),
}


def random(*sizes: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(sizes, device=device, generator=torch.Generator(device).manual_seed(seed)).bfloat16()


def empty(*sizes: int, device: str = "cpu") -> torch.Tensor:
    """Memory that shows what is not written."""
    return torch.full(sizes, float("nan"), device=device, dtype=BF16)


def off(found: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of a row, of any shape, as a part of the row's norm."""
    return float(((found.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max())
