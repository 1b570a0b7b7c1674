"""Shared sampling noise: a pure function of (seed, absolute position, token id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
Layout: key = (seed low 32 bits, seed high 32 bits); counter = (token id // 4, position low 32 bits,
position high 32 bits, 0); output word j belongs to token 4 * (token id // 4) + j.
A word w becomes U = (w + 1/2) / 2^32, clamped to at most 1 - 2^-24, and the noise is the Gumbel
variate -log(-log1p(-U)): exact in its large values, which are the ones that decide an argmax.

Test vector of the generator: key (0xA4093822, 0x299F31D0), counter (0x243F6A88, 0x85A308D3,
0x13198A2E, 0x03707344) gives (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1).
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
LARGEST = 1.0 - 2.0**-24


def _product(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of a * multiplier for int64 tensors of 32-bit words, by halves: it can pass 2^63."""
    low, high = a * (multiplier & 0xFFFF), a * (multiplier >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & MASK


def philox(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Return four output words for each counter; words are int64 tensors of values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def gumbel(seed: int, first: int, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Return noise [rows, vocab] float32 for the tokens at positions ``first .. first + rows - 1``."""
    groups = torch.arange((vocab + 3) // 4, device=device).unsqueeze(0).expand(rows, -1)
    positions = torch.arange(first, first + rows, device=device).unsqueeze(1).expand_as(groups)
    zeros = torch.zeros_like(groups)
    words = philox([groups, positions & MASK, positions >> 32, zeros], (seed & MASK, seed >> 32))
    uniform = (torch.stack(words, dim=-1).view(rows, -1)[:, :vocab].to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_(max=LARGEST)))
