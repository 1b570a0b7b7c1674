"""Describe where a checkpoint's tensors are read to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Conversion:
    """Take a tensor that is not kept as it is stored.

    Attributes:
        shape, dtype: as it is stored. take: puts what is made of it in place, or checks it.
        optional: it may be missing. spread: axes of one element may be left out or added, and a single number may
            stand for all.
        on_host: ``take`` looks at it on the CPU, where that waits for no device.
        blocks: the type of GGUF blocks whose rows [rows, bytes] ``take`` gets, in place of what they stand for; shape
            is that of the weights all the same, and dtype that of bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    take: Callable[[torch.Tensor], None]
    optional: bool = False
    spread: bool = False
    on_host: bool = False
    blocks: str = ""

    def takes(self, shape: tuple[int, ...]) -> bool:
        if not self.spread:
            return shape == self.shape
        wide = [size for size in shape if size != 1]
        return not wide or wide == [size for size in self.shape if size != 1]


Place = torch.Tensor | Conversion
Places = dict[str, Place | None]  # by the tensors' names; None: it may be there, and is not read
