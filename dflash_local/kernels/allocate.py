"""The tensors that ``layout`` describes, on a device."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from math import prod

import torch

from dflash_local.errors import DoesNotFitError
from dflash_local.layout.buffer import HOST_GROUPS, Buffer, distinct

UNIT = 512  # bytes; torch's allocator gives multiples of so many


class Tensors:
    """Tensors by the buffers that describe them. ``joined``: they share one piece of memory, as torch's allocator takes
    a large tensor from the device in units of 2 MiB, which costs a quantised target of 64 layers 2 %.
    """

    def __init__(self, buffers: Iterable[Buffer], device: torch.device, joined: bool = False) -> None:
        self.device = device
        wanted = distinct(buffers)
        # Of whole units, so that the next one begins where it must; and on the device.
        together = {
            name: each
            for name, each in wanted.items()
            if joined and each.nbytes % UNIT == 0 and each.group not in HOST_GROUPS
        }
        self._tensors = {name: _allocated(each, device) for name, each in wanted.items() if name not in together}
        self._tensors |= _pieces(together, device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def beside(self, buffers: Iterable[Buffer]) -> Tensors:
        """Return these, and those of ``buffers`` that are not among them."""
        found = Tensors((each for each in buffers if each.name not in self), self.device)
        found._tensors |= self._tensors
        return found

    def take(self, buffers: Iterable[Buffer]) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensors[buffer.name] for buffer in buffers)


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
    """Return the tensor of a buffer in the front of its memory."""
    return memory.flatten()[: prod(buffer.shape)].view(buffer.shape)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Have kernels launched on this GPU within; nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def make_current(device: torch.device) -> None:
    """Have this thread launch kernels on this GPU from now on; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # ``cuda`` is the first one, whichever is current


def card_name(device: torch.device) -> str:
    """Return what is equal for devices that run kernels alike."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def dtype_name(dtype: torch.dtype) -> str:
    """Spell a dtype as buffers do."""
    return str(dtype).removeprefix("torch.")


PORTABLE, MAPPED = 1, 2  # cudaHostRegister's flags: for every context, and at an address that the device reads


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a host tensor that kernels can read, released with its last view. Raise DoesNotFitError: no room."""
    size = dtype.itemsize * torch.Size(shape).numel()
    try:
        pages = _pages(size)
    except (OSError, ValueError, OverflowError) as error:
        raise _refused(size, str(error)) from None
    array = (ctypes.c_ubyte * size).from_buffer(pages)  # forgotten before the pages are unmapped; a map itself is not
    flat = torch.frombuffer(array, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(flat.data_ptr(), size, PORTABLE | MAPPED))
    if code != 0:
        raise _refused(size, f"CUDA error {code}")
    weakref.finalize(array, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return flat.view(dtype).view(shape)


def _pages(size: int) -> mmap.mmap:
    """Return memory of this process alone; in huge pages where the system has them, so that fewer are to be pinned."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, pinned where the tensor is on a GPU: of the current one made in the order of its
    stream, awaited by nobody; of another one when all that it was given to do is done.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        torch.cuda.synchronize(tensor.device)  # it was written on a stream that nothing here is ordered with
        return copy.copy_(tensor)
    return copy.copy_(tensor, non_blocking=True)


def _refused(size: int, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"the host gives no {size / 2**30:.1f} GiB of pinned memory: {why}",
        "close other programs, raise the limit of locked memory (ulimit -l), or use --offload none with less context",
    )
