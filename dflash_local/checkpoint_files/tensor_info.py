"""One tensor of a checkpoint: what it holds, and where its bytes are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor by its file's header: ``dtype`` as of safetensors (``BF16``), ``offset`` of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int = 0
    undo: tuple[object, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8
