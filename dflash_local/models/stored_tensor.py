"""Tensors out of a checkpoint's file: its bytes as numbers, blocks decoded, and what a converter changed undone."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_local.checkpoint_files.json_file import open_plain
from dflash_local.checkpoint_files.tensor_info import AGAIN, GGML, TensorInfo
from dflash_local.errors import CheckpointError
from dflash_local.models.gguf_rows import joined_rows, joined_values, piece_shape, pieces_of
from dflash_local.models.weight_stream import DTYPES


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """One file, mapped into memory: what is not asked for is not read. ``data``: its bytes, private to this process."""

    file: Path
    data: torch.Tensor

    @classmethod
    def open(cls, file: Path) -> StoredTensors:
        """Raise CheckpointError where the file is missing or cannot be mapped."""
        try:
            with open_plain(file, AGAIN) as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", AGAIN) from error
        return cls(file, torch.frombuffer(mapped, dtype=torch.uint8))

    def read(self, info: TensorInfo) -> torch.Tensor:
        """Return a tensor of the file on the CPU, which may share the file's memory. CheckpointError: the file is
        shorter.
        """
        return joined_values(info, self._pieces(info))

    def read_rows(self, info: TensorInfo) -> torch.Tensor:
        """Return its rows of undecoded blocks, see ``gguf_rows.joined_rows``."""
        return joined_rows(info, self._pieces(info))

    def _pieces(self, info: TensorInfo) -> list[torch.Tensor]:
        homes = ((self if each.file == self.file else StoredTensors.open(each.file), each) for each in pieces_of(info))
        return [home._piece(each) for home, each in homes]

    def _piece(self, info: TensorInfo) -> torch.Tensor:
        data = self.data[info.offset : info.offset + info.nbytes]
        if len(data) != info.nbytes:
            raise CheckpointError(f"{self.file} changed while it was read ({info.name})", AGAIN)
        return _as_stored(data, info)


def _as_stored(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    if info.dtype in GGML:
        return data.view(piece_shape(info))
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(f"{info.file}: tensor {info.name} is stored as {info.dtype}, which is not read")
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(info.shape)
