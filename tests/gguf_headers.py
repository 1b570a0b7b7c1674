"""GGUF files as the ``gguf`` library reads them: headers in our form, and each tensor's values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from dflash_local.checkpoint_files.tensor_info import TensorInfo
from dflash_local.models.gguf_undo import undone


@dataclass(frozen=True, slots=True)
class LibraryHeader:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file: Path


def library_header(file: Path) -> LibraryHeader:
    reader = gguf.GGUFReader(file)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {
        each.name: TensorInfo(
            each.name, each.tensor_type.name, tuple(reversed(each.shape.tolist())), file, int(each.data_offset)
        )
        for each in reader.tensors
    }
    return LibraryHeader(metadata, tensors, file)


def stored_values(info: TensorInfo) -> torch.Tensor:
    """Its values as they stand in the file, float32, parts joined."""
    if info.parts:
        return torch.cat([stored_values(part) for part in info.parts])
    data = np.memmap(info.file, np.uint8, "r", info.offset, (info.nbytes,))
    kind = gguf.GGMLQuantizationType[info.dtype]
    rows = np.ascontiguousarray(data).reshape(-1, info.nbytes * info.shape[-1] // _count(info))
    return torch.from_numpy(gguf.quants.dequantize(rows, kind).reshape(info.shape).astype(np.float32))


def _count(info: TensorInfo) -> int:
    return int(np.prod(info.shape))


def values(info: TensorInfo) -> torch.Tensor:
    """Its values as the model has them, float32."""
    return undone(stored_values(info), info.undo)
