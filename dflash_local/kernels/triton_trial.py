"""Check whether Triton compiles and launches a kernel here, tried before a pair is loaded; its faults as errors of
ours.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from subprocess import SubprocessError

import torch

from dflash_local.errors import KernelError
from dflash_local.kernels.jit import HAVE_TRITON, jit, tl
from dflash_local.planner import software

COMPILE_ERRORS: tuple[type[Exception], ...] = (SubprocessError,)  # of the C compiler, which builds Triton's launchers
if HAVE_TRITON:
    from triton.errors import TritonError

    COMPILE_ERRORS = (*COMPILE_ERRORS, TritonError)
LAUNCH_ERRORS: tuple[type[Exception], ...] = (*COMPILE_ERRORS, RuntimeError, ImportError, OSError, AssertionError)
NO_COMPILER = "Failed to find C compiler"  # as Triton says it, in a RuntimeError
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of an OSError; nothing that is only read raises these


@jit
def _add_one(numbers):
    """Adds 1 to the first number of an int32 tensor."""
    tl.store(numbers, tl.load(numbers) + 1)


@cache
def why_not(device: str) -> KernelError | None:
    """Return why Triton's kernels do not run here, with what to install, or None. Raises the device's faults."""
    try:
        with torch.cuda.device(torch.device(device) if device.startswith("cuda") else -1):
            numbers = torch.full((1,), 41, dtype=torch.int32, device=device)
            _add_one[(1,)](numbers)
            return None if int(numbers) == 42 else KernelError("Triton's kernels compute wrong numbers here", UPGRADE)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except LAUNCH_ERRORS as error:
        return explained(error)


MAKE_ROOM = "make room, or set TRITON_CACHE_DIR to a folder that can be written"
UPGRADE = "dflash doctor lists the versions; reinstall torch, which brings the Triton that it was tested with"


def explained(error: Exception) -> KernelError:
    """Return an error of Triton's, or of the C compiler that it calls, in one line with what to install."""
    if isinstance(error, OSError) and error.errno in (*UNWRITABLE, errno.EACCES):
        return KernelError(f"Triton cannot keep what it compiles: {error.strerror}", MAKE_ROOM)
    if NO_COMPILER in str(error):
        return KernelError("Triton cannot compile kernels: no C compiler was found", software.INSTALL_COMPILER)
    if isinstance(error, SubprocessError):
        if not software.c_compiler(None).headers:
            return KernelError("Triton cannot compile kernels: Python.h is missing", software.INSTALL_HEADERS)
        return KernelError("Triton cannot compile kernels: the C compiler failed", software.INSTALL_COMPILER)
    message = (str(error).strip().splitlines() or [""])[-1]
    return KernelError(f"Triton cannot compile kernels: {type(error).__name__}: {message}", UPGRADE)


@contextmanager
def named_compile_errors() -> Iterator[None]:
    """Guard work that launches Triton's kernels. Raise KernelError where one of them could not be compiled."""
    try:
        yield
    except COMPILE_ERRORS as error:
        raise explained(error) from error
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise  # of a file that is read
        raise explained(error) from error
