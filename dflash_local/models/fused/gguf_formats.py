"""Weights of GGUF files as the engine keeps them: blocks taken apart where they are read, and put into words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels.gguf_blocks import CARD_CHUNK, BlockParts, parts_of
from dflash_local.kernels.quantized_weight import Fp4Weight, GgufWeight, IntWeight, planes
from dflash_local.layout.linear import GgufBlocks, MatrixPart, matrix_rows
from dflash_local.models.fused.quantized_formats import FP4, INT, Decoded
from dflash_local.models.place import Conversion, Places

Kept = GgufWeight | IntWeight | Fp4Weight
NEGATIVE_ZERO = 8  # a code of e2m1; in GGUF it stands for zero
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
    n, k = weight.shape
    step = max(1, CARD_CHUNK // k)
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        parts = parts_of(stored[rows].reshape(-1, BLOCKS[dtype][1]), dtype)
        _put(_rows_of(weight, rows), parts)


def _put(weight: Kept, parts: BlockParts) -> None:
    codes = parts.codes.reshape(weight.shape)
    weight.scales.copy_(parts.scales.reshape(weight.scales.shape))
    if isinstance(weight, GgufWeight):
        for kept, found in ((weight.minima, parts.minima), (weight.factors, parts.factors)):
            if kept is not None and found is not None:
                kept.copy_(found.reshape(kept.shape))
        lowest, above = planes(weight.codes, weight.bits)
        lowest.copy_(_words(codes & 15, 4))
        if weight.bits > 4:
            above.copy_(_words(codes >> 4, weight.bits - 4))
    elif isinstance(weight, IntWeight):
        weight.codes.copy_(_words(codes, weight.bits))
    else:
        weight.codes.copy_(_words(codes.masked_fill(codes == NEGATIVE_ZERO, 0), 4))


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 words of uint8 codes [n, K] that have no higher bits, the first in the lowest bits."""
    apart = codes.unflatten(1, (-1, 8 // bits))
    bytes_ = apart[..., 0]
    for place in range(1, 8 // bits):
        bytes_ = bytes_ | apart[..., place] << place * bits
    return bytes_.contiguous().view(torch.int32)
