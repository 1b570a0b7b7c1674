"""Tensors out of a checkpoint's file: its bytes as numbers, blocks decoded, and what a converter changed undone."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_local.checkpoint_files.json_file import open_plain
from dflash_local.checkpoint_files.tensor_info import GGML, TensorInfo
from dflash_local.checkpoint_files.weight_file import AGAIN
from dflash_local.errors import CheckpointError
from dflash_local.kernels.gguf_blocks import decode_blocks
from dflash_local.models.gguf_undo import undone
from dflash_local.models.weight_stream import DTYPES


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """One file, mapped into memory: what is not asked for is not read. ``data``: its bytes, private to this process."""

    file: Path
    data: torch.Tensor

    @classmethod
    def open(cls, file: Path) -> StoredTensors:
        """Raises CheckpointError: the file is missing or cannot be mapped."""
        try:
            with open_plain(file, AGAIN) as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", AGAIN) from error
        return cls(file, torch.frombuffer(mapped, dtype=torch.uint8))

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A tensor of the file on the CPU, which may share the file's memory. CheckpointError: the file is shorter."""
        if info.parts:
            return undone(torch.cat([self.read(part) for part in info.parts]), info.undo)
        data = self.data[info.offset : info.offset + info.nbytes]
        if len(data) != info.nbytes:
            raise CheckpointError(f"{self.file} changed while it was read ({info.name})", AGAIN)
        return undone(_decoded(data, info), info.undo)


def _decoded(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    if info.dtype in GGML:
        rows = data.view(*info.shape[:-1], -1)
        return decode_blocks(rows, info.dtype)
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(f"{info.file}: tensor {info.name} is stored as {info.dtype}, which is not read")
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(info.shape)
