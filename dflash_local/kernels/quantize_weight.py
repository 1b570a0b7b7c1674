"""Plain matrices to codes and scales, without calibration: as accurate as rounding can be, in slices, deterministic.

Scales of four bits are searched for, since sixteen levels are few; those of eight bits follow from the largest weight.
"""

from __future__ import annotations

import torch

from dflash_local.kernels.quantized_weight import Fp8Weight, IntWeight, row_slices, words_of

FP8_MAX = 448.0  # of e4m3fn
# Of the scale that just reaches a group's extreme, where the search begins: below the last one too much is cut off.
STARTS = (1.0, 0.91, 0.82, 0.73, 0.64, 0.55)


def quantize(plain: torch.Tensor, weight: IntWeight | Fp8Weight) -> None:
    """Fill a weight with what comes nearest to a matrix [N, K] anywhere; beside both a float32 slice is held."""
    for rows in row_slices(weight, weight.block[0] if isinstance(weight, Fp8Weight) else 1):
        part = plain[rows].to(weight.device).float()
        if isinstance(weight, IntWeight):
            _integers(part, weight, rows)
        else:
            _blocks(part, weight, rows)


def _integers(plain: torch.Tensor, weight: IntWeight, rows: slice) -> None:
    """Fill symmetric codes; groups of any size that divides K."""
    half = 2 ** (weight.bits - 1)
    groups = plain.unflatten(1, (-1, weight.group_size))
    scales = least_error_scales(groups, half) if weight.bits == 4 else _quotient(groups.abs().amax(-1), half - 1)
    stored = _settled(scales, weight.scales.dtype)
    weight.scales[rows] = stored
    codes = _nearest(groups, stored.float(), half).flatten(1).to(torch.int32).add_(half)
    weight.codes[rows] = words_of(codes.unflatten(1, (weight.codes.shape[1], -1)), weight.bits)


def _blocks(plain: torch.Tensor, weight: Fp8Weight, rows: slice) -> None:
    """Fill e4m3 codes of blocks, the last ones of a side perhaps smaller."""
    n, k = plain.shape
    height, width = weight.block[0], min(weight.block[1], k)
    tall, wide = -(-n // height), -(-k // width)
    padded = torch.nn.functional.pad(plain.abs(), (0, wide * width - k, 0, tall * height - n))
    stored = _settled(_quotient(padded.view(tall, height, wide, width).amax((1, 3)), FP8_MAX), weight.scales.dtype)
    del padded
    first = rows.start // height
    weight.scales[first : first + tall] = stored
    each = stored.float().repeat_interleave(height, 0)[:n].repeat_interleave(width, 1)[:, :k]
    # A scale that was rounded down puts the largest weight beyond the format's end, which would make it NaN.
    weight.codes[rows] = (plain / each).clamp_(-FP8_MAX, FP8_MAX).to(weight.codes.dtype)


def least_error_scales(groups: torch.Tensor, half: int) -> torch.Tensor:
    """Return scales [..., groups] for the least squared error of codes from ``-half`` to ``half - 1``.

    The idea of OMSE (Choukroun et al. 2019, arXiv 1902.06822): a scale is chosen by the squared error that it leaves,
    not by the largest weight. Here by alternating least squares: codes are rounded at a scale, and for given codes q
    the best scale is <w, q> / <q, q>, which leaves |w|^2 - <w, q>^2 / <q, q>. Each start is followed for two rounds.
    The starts are negative where a group's extreme is positive, so that the extreme meets ``-half``, the code that has
    no counterpart above zero.

    Args:
        groups: float32 [..., groups, group size].
    """
    low, high = torch.aminmax(groups, dim=-1)
    reach = torch.where(high > -low, high, low) / -half
    best, scales = torch.full_like(reach, -1.0), reach.clone()
    for start in STARTS:
        found = reach * start
        for _ in range(2):
            codes = _nearest(groups, _nonzero(found), half)
            square = (codes * codes).sum(-1)
            match = codes.mul_(groups).sum(-1)
            found = torch.where(square > 0, match / square, found)
        saved = match * found
        better = saved > best
        best, scales = torch.where(better, saved, best), torch.where(better, found, scales)
    return scales


def _nearest(groups: torch.Tensor, scales: torch.Tensor, half: int) -> torch.Tensor:
    return (groups / scales.unsqueeze(-1)).round_().clamp_(-half, half - 1)


def _quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide with the same bits on every device: by a number, CUDA multiplies with its reciprocal instead."""
    return values / torch.full((), divisor, device=values.device, dtype=values.dtype)


def _settled(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales as they are stored, none of them zero."""
    return _nonzero(scales.to(dtype))


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """Return one in place of zero: of a group that is all zeros, or as good as that."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)
