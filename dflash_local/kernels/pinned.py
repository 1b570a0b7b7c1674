"""Pinned host memory of exactly the size that is asked for; torch's own allocator of it takes the next power of two."""

from __future__ import annotations

import mmap
import weakref

import torch

from dflash_local.errors import DoesNotFitError

PORTABLE, MAPPED = 1, 2  # cudaHostRegister's flags: for every context, and at an address that the device reads


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the host that CUDA kernels can read; given back with its last view.

    Raises:
        DoesNotFitError: the host does not give so much memory that stays in place.
    """
    size = max(1, dtype.itemsize * torch.Size(shape).numel())
    try:
        pages = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise _refused(size, str(error)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to pin
        pages.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(flat.data_ptr(), size, PORTABLE | MAPPED)
    if int(code) != 0:
        raise _refused(size, f"CUDA error {int(code)}")
    weakref.finalize(pages, runtime.cudaHostUnregister, flat.data_ptr())
    return flat[: dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, pinned where the tensor is on a GPU: made in the order of its stream, awaited by nobody."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def _refused(size: int, why: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"the host gives no {size / 2**30:.1f} GiB of pinned memory: {why}",
        "close other programs, raise the limit of locked memory (ulimit -l), or use --offload none with less context",
    )
