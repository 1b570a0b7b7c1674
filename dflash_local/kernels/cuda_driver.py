"""Kernels that are not Triton's: loaded and launched through the CUDA driver, on torch's current stream.

A launch copies its arguments, so a captured graph needs nothing of the call but the memory that pointers name.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch

from dflash_local.kernels import nvrtc

OUT_OF_MEMORY = 2  # CUDA_ERROR_...
WARP_SIZE = 32
OVERLAPPING_LAUNCHES = (9, 0)  # the compute capability from which a kernel may begin while the last one ends
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...


Argument = torch.Tensor | int | ctypes.c_int64 | ctypes.c_float | None


class _Attribute(ctypes.Structure):
    _fields_: ClassVar = [("id", ctypes.c_int), ("_pad", ctypes.c_char * 4), ("value", ctypes.c_char * 64)]


class _LaunchConfig(ctypes.Structure):
    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class LoadedKernel:
    """A cubin's kernel on a device; ``shared_bytes``: dynamic, of a block. Raises RuntimeError: also in a capture."""

    def __init__(self, cubin: bytes, name: str, threads: int, shared_bytes: int, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a kernel must run once before it is captured: nothing is loaded during a capture")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._config = _LaunchConfig()
        self._config.block[:] = [threads, 1, 1]
        self._config.shared_bytes = shared_bytes
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the device's context
            check(driver().cuModuleLoadData(ctypes.byref(self._module), cubin))
            check(driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
            limit = MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver().cuFuncSetAttribute(self._function, limit, ctypes.c_int(shared_bytes)))
        if torch.cuda.get_device_capability(device) >= OVERLAPPING_LAUNCHES:
            self._overlap = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", b"\1")
            self._config.attributes = ctypes.pointer(self._overlap)
            self._config.num_attributes = 1

    def launch(self, blocks: int, arguments: Sequence[Argument]) -> None:
        """Run it on the current stream. Tensors and None are pointers, a plain int is 32 bits wide."""
        values = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._config.grid[:] = [blocks, 1, 1]
        self._config.stream = torch.cuda.current_stream().cuda_stream
        check(driver().cuLaunchKernelEx(ctypes.byref(self._config), self._function, places, None))


def _value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    if isinstance(argument, (ctypes.c_int64, ctypes.c_float)):
        return argument
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


@cache
def driver() -> ctypes.CDLL:
    """Return the library of the installed driver."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def driver_version() -> int:
    """Return the newest CUDA that the driver knows, as 13000 for 13.0."""
    version = ctypes.c_int()
    check(driver().cuDriverGetVersion(ctypes.byref(version)))
    return version.value


def check(result: int) -> None:
    """Raise torch.OutOfMemoryError where the device has none left, RuntimeError for other answers of the driver."""
    if result:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        kind = torch.OutOfMemoryError if result == OUT_OF_MEMORY else RuntimeError
        raise kind(f"the CUDA driver: {(text.value or b'').decode() or result}")


def cubin(source: str, options: Sequence[str], device: torch.device, own_instructions: bool = False) -> bytes:
    """Compile a source for a device, see ``nvrtc.cubin``. ``options``: of the compiler, but for the card."""
    capability = torch.cuda.get_device_capability(device)
    return nvrtc.cubin(source, options, capability, driver_version(), own_instructions)
