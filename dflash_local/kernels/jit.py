"""Triton where it is installed, and a stand-in where it is not, so that PyTorch references work on every machine."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch

from dflash_local.catalog.engine_rule import OLDEST_CARD

OVERLAPPING_GRAPHS = 12030  # the driver's CUDA from which graphs keep that
FEW_ROWS = 64  # up to which a program is of one row: a block's, which is to be ready soon and has the same bits always
MOST_ROWS, PROGRAM_NUMBERS = 16, 2048  # of a program of many rows: loads stay in flight, numbers in registers

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq

    jit: Any = triton.jit
    HAVE_TRITON = True
except ModuleNotFoundError:

    class _Language:
        """Answers for ``tl`` where kernels are only defined, never run."""

        class constexpr:
            """A constant of a kernel, or the type of one of its parameters."""

            def __init__(self, value: object) -> None:
                self.value = value

    tl = _Language()  # type: ignore[assignment]
    HAVE_TRITON = False

    def jit(function: Any = None, **options: Any) -> Any:
        """The function as it is."""
        return jit if options else function


@jit
def start_next_kernel():
    """Let the next kernel be set up while this one runs, if it is launched with ``overlapping``."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@jit
def wait_for_earlier_kernels():
    """Wait, in each kernel that is launched with ``overlapping``: nothing that a kernel writes is read before it, and
    nothing is written.
    """
    if cuda_capability_geq(9, 0):
        gdc_wait()


def overlapping(tensor: Placed) -> dict[str, bool]:
    """Launch options of a kernel with ``wait_for_earlier_kernels``: it is set up while the one before it runs
    (programmatic dependent launch). Not for many programs behind a kernel that fills the multiprocessors: all would
    crowd on the first few that become free.
    """
    return {"launch_pdl": True} if tensor.is_cuda and _overlaps(torch.cuda.current_device()) else {}


@cache
def _overlaps(device: int) -> bool:
    from dflash_local.kernels.cuda_driver import OVERLAPPING_LAUNCHES, driver_version

    return torch.cuda.get_device_capability(device) >= OVERLAPPING_LAUNCHES and driver_version() >= OVERLAPPING_GRAPHS


class Placed(Protocol):
    """A tensor, or a weight that lies on a device like one."""

    @property
    def is_cuda(self) -> bool:
        """Return True on a GPU."""


def runs_kernels(tensor: Placed) -> bool:
    """Return True where a tensor's work is done by Triton: on CUDA, where Triton is installed."""
    return HAVE_TRITON and tensor.is_cuda and torch.version.hip is None


def why_no_kernels(device: str) -> str:
    """Return why the kernels are not for a device as torch names it; empty when they run there."""
    if not device.startswith("cuda"):
        return f"the device here is {device}"
    if not HAVE_TRITON:
        return "triton is not installed"
    if torch.version.hip is not None:  # torch calls such a card cuda, with a capability of 9 to 12
        return "nobody has tried them on an AMD card yet"
    if torch.cuda.get_device_capability(device) < OLDEST_CARD:
        return f"{torch.cuda.get_device_name(device)} is older than they are"
    return ""


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def rows_of_program(rows: int, width: int) -> tuple[int, int]:
    """Return how many of so many rows one program takes, and with how many warps, where a row has ``width`` numbers."""
    return (1, 1) if rows <= FEW_ROWS else (max(1, min(MOST_ROWS, PROGRAM_NUMBERS // width)), 4)
