"""Pinned host memory of exactly the requested size; torch's own allocator of it takes the next power of two."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress

import torch

from dflash_local.errors import DoesNotFitError

PORTABLE, MAPPED = 1, 2  # cudaHostRegister's flags: for every context, and at an address that the device reads


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A host tensor that CUDA kernels can read, given back with its last view. Raises DoesNotFitError: no room."""
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
    """Memory of this process alone; in huge pages where the system has them, so that fewer are to be pinned."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, pinned where the tensor is on a GPU: made in the order of its stream, awaited by nobody."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def _refused(size: int, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"the host gives no {size / 2**30:.1f} GiB of pinned memory: {why}",
        "close other programs, raise the limit of locked memory (ulimit -l), or use --offload none with less context",
    )
