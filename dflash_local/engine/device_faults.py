"""Faults of the device as torch and the driver raise them: which are a lack of memory, and which end its context."""

from __future__ import annotations

import gc

import torch

LOST = ("CUDA error", "the CUDA driver:", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED")
# A lack of memory that torch's allocator did not see: on the CPU, of the driver, of a library's workspace.
FULL = ("DefaultCPUAllocator", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
NO_KERNELS = "no kernel image is available"  # torch was not built for this card
LEAST_CONTEXT = 256  # tokens; a shorter one is of no use
KEPT = 3, 4  # of the tokens that there was room for: the rest is the reserve


def is_out_of_memory(error: BaseException) -> bool:
    """Return True where the device, or the host, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in FULL)


def is_lost(error: BaseException) -> bool:
    """Return True where the device's context is unusable: after a suspend, or a kernel that went wrong."""
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(word in str(error) for word in LOST)


def first_line(error: BaseException) -> str:
    """Return what an error says, without the advice that torch adds below."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def smaller_context(context: int, held: int) -> int:
    """Return the context after memory ran out, with a reserve; the same where too little was held to be the cause."""
    if held < LEAST_CONTEXT:
        return context
    return min(context, max(LEAST_CONTEXT, held * KEPT[0] // KEPT[1]))


def release_memory(device: torch.device) -> None:
    """Return what is free to the device, for this and for other programs."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
