"""The tensors that ``layout`` describes, on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch

from dflash_local.kernels.pinned import pinned_empty
from dflash_local.layout.buffer import HOST_GROUPS, Buffer, distinct

UNIT = 512  # bytes; torch's allocator gives multiples of so many


class Tensors:
    """Tensors by the buffers that describe them. ``joined``: they share one piece of memory, as torch's allocator takes
    a large tensor from the device in units of 2 MiB, which costs a quantised target of 64 layers 2 %.
    """

    def __init__(self, buffers: Iterable[Buffer], device: torch.device, joined: bool = False) -> None:
        self.device = device
        wanted = distinct(buffers)
        together = {name: each for name, each in wanted.items() if joined and _joins(each)}
        self._tensors = {name: _allocated(each, device) for name, each in wanted.items() if name not in together}
        self._tensors |= _pieces(together, device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, buffers: Iterable[Buffer]) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensors[buffer.name] for buffer in buffers)


def _joins(buffer: Buffer) -> bool:
    """Of whole units, so that the next one begins where it must; and on the device."""
    return buffer.nbytes % UNIT == 0 and buffer.group not in HOST_GROUPS


def _pieces(buffers: Mapping[str, Buffer], device: torch.device) -> dict[str, torch.Tensor]:
    whole = torch.empty(sum(buffer.nbytes for buffer in buffers.values()), dtype=torch.uint8, device=device)
    pieces = whole.split([buffer.nbytes for buffer in buffers.values()])
    found = {}
    for (name, buffer), piece in zip(buffers.items(), pieces, strict=True):
        found[name] = _in_front(piece.view(getattr(torch, buffer.dtype)), buffer)
        if buffer.zeroed:
            found[name].zero_()
    return found


def _allocated(buffer: Buffer, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, buffer.dtype)
    if buffer.group in HOST_GROUPS and device.type == "cuda":
        return pinned_empty(buffer.shape, dtype)
    make = torch.zeros if buffer.zeroed else torch.empty
    return _in_front(make(buffer.room or buffer.shape, device=device, dtype=dtype), buffer)


def _in_front(memory: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """The tensor of a buffer in the front of its memory."""
    return memory.flatten()[: prod(buffer.shape)].view(buffer.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """As buffers spell it."""
    return str(dtype).removeprefix("torch.")
