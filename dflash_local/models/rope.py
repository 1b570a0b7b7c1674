"""Rotary position embedding: inverse frequencies of four kinds, cos/sin tables that grow by doubling.

Float32 in the operation order of transformers' ``ROPE_INIT_FUNCTIONS``, with whose bits drafters were trained: at
position 1e5 the last bit of a frequency is an angle of 0.006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dflash_local.config.rope_parameters import RopeParameters

FIRST_ROWS = 512


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Return radians per position, float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    powers = rope.theta**exponents
    if rope.kind == "yarn":
        return _yarn(rope, powers, head_dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _yarn(rope: RopeParameters, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Keep the frequency of fast dimensions, stretch slow ones, with a linear ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in the reference: no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _llama3(rope: RopeParameters, plain: torch.Tensor) -> torch.Tensor:
    """Stretch long wavelengths, keep short ones, with a smooth blend between."""
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_positions / rope.high_freq_factor
    shortest_stretched = rope.original_positions / rope.low_freq_factor
    stretched = torch.where(wavelength > shortest_stretched, plain / rope.factor, plain)
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / spread
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelength >= longest_kept) & (wavelength <= shortest_stretched)
    return torch.where(between, blended, stretched)


class RopeTable:
    """cos and signed sin of positions, in the model's dtype: ``x * cos + x.roll(half, -1) * signed_sin`` rotates."""

    def __init__(self, rope: RopeParameters, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._half = head_dim // 2
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._factor = rope.attention_factor
        self._dtype = dtype
        self._cos = self._signed_sin = torch.empty(0, 1, head_dim, device=device, dtype=dtype)

    def rows(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin of positions ``start .. start+count-1``, each [count, 1, head_dim]."""
        end = start + count
        if end > len(self._cos):
            size = max(FIRST_ROWS, 1 << (end - 1).bit_length())
            positions = torch.arange(size, device=self._frequencies.device, dtype=torch.float32)
            angles = torch.outer(positions, self._frequencies).unsqueeze(1)
            cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
            self._cos = torch.cat((cos, cos), -1).to(self._dtype)
            self._signed_sin = torch.cat((-sin, sin), -1).to(self._dtype)
        return self._cos[start:end], self._signed_sin[start:end]


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half (neox) rotation of ``x`` [rows, heads, head_dim] over the whole head."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def fill_rotation(tables: Sequence[torch.Tensor], rope: RopeParameters) -> None:
    """Fill cos and sin [positions, rotary_dim] of all positions, computed in float32."""
    cos, sin = tables
    frequencies = inverse_frequencies(rope, cos.shape[1]).to(cos.device)
    angles = torch.outer(torch.arange(len(cos), device=cos.device, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), -1)
    cos.copy_(angles.cos() * rope.attention_factor)
    sin.copy_(angles.sin() * rope.attention_factor)
