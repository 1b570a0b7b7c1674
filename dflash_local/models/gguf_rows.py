"""Tensors of checkpoints whose pieces were read: decoded, or as rows of undecoded blocks, in the model's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS, GGML, TensorInfo
from dflash_local.checkpoint_files.undo import Add, Interleave, SwapAxes, Undo, moves_columns
from dflash_local.kernels.gguf_blocks import decode_blocks, stored_floats
from dflash_local.layout.linear import DECODED_SLICE


def pieces_of(info: TensorInfo) -> tuple[TensorInfo, ...]:
    """Return what a tensor is read in: its parts, or itself."""
    return info.parts or (info,)


def piece_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of a piece as it is read: blocks are rows [rows, bytes]."""
    if info.dtype not in GGML:
        return info.shape
    weights, size = BLOCKS[info.dtype]
    return *info.shape[:-1], info.shape[-1] // weights * size


def joined_values(info: TensorInfo, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor as the model has it; blocks become float32. It may share the memory of a single piece."""
    values = [
        decode_blocks(piece, each.dtype) if each.dtype in GGML else piece
        for each, piece in zip(pieces_of(info), pieces, strict=True)
    ]
    return undone(values[0] if len(values) == 1 else torch.cat(values), info.undo)


def joined_rows(info: TensorInfo, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows of blocks of one type, uint8 [rows, bytes], put in order; columns are in that of the file."""
    rows = tuple(step for step in info.undo if not moves_columns(step))
    return undone(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)), rows)


def copy_values(info: TensorInfo, pieces: Sequence[torch.Tensor], place: torch.Tensor) -> None:
    """Put ``joined_values`` in place; of a tensor that only is to be decoded a slice is held beside both."""
    if info.parts or info.undo or info.dtype not in GGML:
        place.copy_(joined_values(info, pieces))
        return
    step = max(1, DECODED_SLICE * place.shape[0] // place.numel())
    for rows, into in zip(pieces[0].split(step), place.split(step), strict=True):
        into.copy_(decode_blocks(rows, info.dtype))


def floats_of(info: TensorInfo, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return floats of whatever shape that the pieces hold: where they are finite, so are all values."""
    found = [
        stored_floats(piece.reshape(-1, BLOCKS[each.dtype][1]), each.dtype) if each.dtype in GGML else piece
        for each, piece in zip(pieces_of(info), pieces, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat([each.flatten().float() for each in found])


def undone(values: torch.Tensor, undo: tuple[Undo, ...]) -> torch.Tensor:
    """Return a tensor as the model has it.

    Args:
        values: whole, of the shape of its ``TensorInfo``, parts joined. Rows of undecoded blocks [rows, bytes] do as
            well where ``moves_rows_only``.
    """
    for step in undo:
        if isinstance(step, SwapAxes):
            values = _swapped(values, step)
        elif isinstance(step, Interleave):
            kinds = zip(values.split([step.groups * width for width in step.widths]), step.widths)
            values = torch.cat([kind.unflatten(0, (step.groups, width)) for kind, width in kinds], 1).flatten(0, 1)
        elif isinstance(step, Add):
            values = values + step.number
        else:
            values = torch.log(-values)
    return values


def _swapped(values: torch.Tensor, step: SwapAxes) -> torch.Tensor:
    axis, end = step.axis, step.start + step.size
    middle = values.narrow(axis, step.start, step.size).unflatten(
        axis, (step.outer, step.first, step.second, step.inner)
    )
    middle = middle.transpose(axis + 1, axis + 2).flatten(axis, axis + 3)
    before, behind = values.narrow(axis, 0, step.start), values.narrow(axis, end, values.shape[axis] - end)
    return torch.cat([before, middle, behind], dim=axis)
