"""Weights of GGUF files as the engine keeps them: blocks taken apart where they are read, and put into words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels.gguf_blocks import CARD_CHUNK, parts_of
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.move_bits import BitMoves, move_bits, trace
from dflash_local.kernels.quantized_weight import Fp4Weight, GgufWeight, IntWeight, planes, row_slices
from dflash_local.layout.linear import GgufBlocks, MatrixPart, matrix_rows
from dflash_local.models.fused.quantized_formats import FP4, INT, Decoded
from dflash_local.models.place import Conversion, Places

Kept = GgufWeight | IntWeight | Fp4Weight
SPREAD = {4: 4.6, 5: 9.2, 6: 18.5}  # root mean square of random codes around the middle one


class _GgufWeights(Decoded):
    """Operate on ``GgufWeight``."""

    def rows_of(self, weight: GgufWeight, rows: slice) -> GgufWeight:
        minima, factors = (None if each is None else each[rows] for each in (weight.minima, weight.factors))
        return GgufWeight(
            weight.codes[rows], weight.scales[rows], minima, factors, weight.dtype, weight.bits, weight.table
        )

    def randomize(self, weight: GgufWeight, generator: torch.Generator) -> None:
        weight.codes.random_(-(2**31), 2**31, generator=generator)
        size = weight.shape[1] ** -0.5 / (70.0 if weight.table else SPREAD[weight.bits])
        if weight.factors is None:
            weight.scales.fill_(size)
            if weight.minima is not None:
                weight.minima.fill_(-size * 2 ** (weight.bits - 1))
            return
        weight.scales.random_(16, 32, generator=generator)
        weight.factors.fill_(size / 24)
        if weight.minima is not None:
            weight.minima.copy_(weight.scales)
            weight.factors[:, 1::2] *= 2 ** (weight.bits - 1)


class _GgufBlocks:
    """Read blocks; two types are integers and one is FP4, as other files have them."""

    def weight(self, form: GgufBlocks, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Kept:
        kept = GGUF_TYPES[form.stored.type]
        codes, scales, *others = tensors
        if kept.coding == "e2m1":
            return Fp4Weight(codes, scales, None, dtype)
        if kept.coding == "integer" and not others and kept.bits in (4, 8):
            return IntWeight(codes, scales, None, dtype, kept.bits)
        minima, factors = others[0] if kept.minima else None, others[-1] if kept.nested else None
        return GgufWeight(codes, scales, minima, factors, dtype, kept.bits, kept.coding == "iq4")

    def places(self, weight: Kept, form: GgufBlocks, parts: Sequence[MatrixPart]) -> Places:
        places: Places = {}
        for part, rows in matrix_rows(parts):
            take = partial(_take_blocks, _rows_of(weight, rows), form.stored.type)
            shape = part.out_features, weight.shape[1]
            places[f"{part.module}.weight"] = Conversion(shape, torch.uint8, take, blocks=form.stored.type)
        return places


GGUF, GGUF_BLOCKS = _GgufWeights(), _GgufBlocks()


def _rows_of(weight: Kept, rows: slice) -> Kept:
    if isinstance(weight, GgufWeight):
        return GGUF.rows_of(weight, rows)
    return INT.rows_of(weight, rows) if isinstance(weight, IntWeight) else FP4.rows_of(weight, rows)


def _take_blocks(weight: Kept, dtype: str, stored: torch.Tensor) -> None:
    """Fill a weight from rows of blocks, uint8 [N, bytes of a row], on its device; beside both a slice is held."""
    (n, k), size = weight.shape, BLOCKS[dtype][1]
    targets = [part.view(torch.uint8) for part in _parts(weight)]
    if runs_kernels(stored):
        for moves, target in zip(_block_moves(dtype, stored.device), targets, strict=True):
            move_bits(moves, stored, target, (1, size, 0), stored.shape[1])
    else:
        step = max(1, CARD_CHUNK // k)
        for begin in range(0, n, step):
            rows = slice(begin, min(begin + step, n))
            for target, found in zip(targets, _kept_parts(stored[rows].reshape(-1, size), dtype), strict=True):
                target[rows] = found.view(rows.stop - begin, -1)
    if isinstance(weight, Fp4Weight):
        for rows in row_slices(weight):
            _clear_negative_zeros(weight.codes[rows])


def _parts(weight: Kept) -> list[torch.Tensor]:
    """Return the tensors of a weight, each [N, numbers], its codes as planes."""
    if not isinstance(weight, GgufWeight):
        return [weight.codes, weight.scales]
    lowest, above = planes(weight.codes, weight.bits)
    found = lowest, above if weight.bits > 4 else None, weight.scales, weight.minima, weight.factors
    return [part for part in found if part is not None]


def _kept_parts(blocks: torch.Tensor, dtype: str) -> list[torch.Tensor]:
    """Return what is kept of blocks [n, bytes of one], each part uint8 [n, bytes], in the order of ``_parts``."""
    codes, *others = parts_of(blocks, dtype)
    bits = GGUF_TYPES[dtype].bits
    words = [_words(codes, bits)] if bits in (4, 8) else [_words(codes & 15, 4), _words(codes >> 4, bits - 4)]
    return [part.contiguous().view(torch.uint8) for part in (*words, *others) if part is not None]


@cache
def _block_moves(dtype: str, device: torch.device) -> list[BitMoves]:
    def part(at: int, blocks: torch.Tensor) -> torch.Tensor:
        return _kept_parts(blocks, dtype)[at]

    size = BLOCKS[dtype][1]
    count = len(_kept_parts(torch.zeros(2, size, dtype=torch.uint8), dtype))
    return [trace(partial(part, at), size, device) for at in range(count)]


def _clear_negative_zeros(codes: torch.Tensor) -> None:
    """Take the sign from codes of zero: in e2m1 it is kept, in GGUF it means nothing."""
    magnitude = codes & 0x77777777
    codes.bitwise_and_(magnitude | (magnitude << 1 | magnitude << 2 | magnitude << 3) & -0x77777778)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 words of uint8 codes [n, K] that have no higher bits, the first in the lowest bits."""
    apart = codes.unflatten(1, (-1, 8 // bits))
    bytes_ = apart[..., 0]
    for place in range(1, 8 // bits):
        bytes_ = bytes_ | apart[..., place] << place * bits
    return bytes_.contiguous().view(torch.int32)
