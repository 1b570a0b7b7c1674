"""The tensors that ``layout`` describes, on a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dflash_local.layout.buffer import Buffer, distinct


class Tensors:
    """Tensors by the buffers that describe them."""

    def __init__(self, buffers: Iterable[Buffer], device: torch.device) -> None:
        self.device = device
        self._tensors = {name: _allocated(buffer, device) for name, buffer in distinct(buffers).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, buffers: Iterable[Buffer]) -> tuple[torch.Tensor, ...]:
        """The tensors of these buffers, in their order."""
        return tuple(self._tensors[buffer.name] for buffer in buffers)


def _allocated(buffer: Buffer, device: torch.device) -> torch.Tensor:
    make = torch.zeros if buffer.zeroed else torch.empty
    return make(buffer.shape, device=device, dtype=getattr(torch, buffer.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """As buffers spell it."""
    return str(dtype).removeprefix("torch.")
