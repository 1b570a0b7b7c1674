"""Tensors of checkpoints whose pieces were read: decoded, or as rows of undecoded blocks, in the model's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS, GGML, TensorInfo
from dflash_local.checkpoint_files.undo import moves_columns
from dflash_local.kernels.gguf_blocks import decode_blocks
from dflash_local.kernels.gguf_codes import stored_floats
from dflash_local.layout.linear import DECODED_SLICE
from dflash_local.models.gguf_undo import undone


def pieces_of(info: TensorInfo) -> tuple[TensorInfo, ...]:
    """What a tensor is read in: its parts, or itself."""
    return info.parts or (info,)


def piece_shape(info: TensorInfo) -> tuple[int, ...]:
    """Of a piece as it is read: blocks are rows [rows, bytes]."""
    if info.dtype not in GGML:
        return info.shape
    weights, size = BLOCKS[info.dtype]
    return *info.shape[:-1], info.shape[-1] // weights * size


def joined_values(info: TensorInfo, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor as the model has it; blocks become float32. It may share the memory of a single piece."""
    values = [
        decode_blocks(piece, each.dtype) if each.dtype in GGML else piece
        for each, piece in zip(pieces_of(info), pieces, strict=True)
    ]
    return undone(values[0] if len(values) == 1 else torch.cat(values), info.undo)


def joined_rows(info: TensorInfo, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of blocks of one type, uint8 [rows, bytes], put in order; columns are in that of the file."""
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
    """Of whatever shape, with which all of a tensor's values are finite: those that its pieces hold."""
    found = [
        stored_floats(piece.reshape(-1, BLOCKS[each.dtype][1]), each.dtype) if each.dtype in GGML else piece
        for each, piece in zip(pieces_of(info), pieces, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat([each.flatten().float() for each in found])
