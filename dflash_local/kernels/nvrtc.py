"""CUDA C++ compiled at run time by NVRTC of torch's own CUDA, and kept on disk for each card, driver and NVRTC."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from dflash_local import settings
from dflash_local.errors import MissingDependencyError
from dflash_local.planner import nvrtc_files
from dflash_local.store.kept import keep
from dflash_local.store.paths import cubins_folder


class Nvrtc:
    """One NVRTC library. ``version``: major and minor, those of its CUDA."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, as 90 for 9.0."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        return tuple(found)

    def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Compile to a cubin, with the compiler's words; one option is ``--gpu-architecture=sm_XX``. Raises
        RuntimeError.
        """
        program = ctypes.c_void_p()
        text = source.encode()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None))
        try:
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = self._library.nvrtcCompileProgram(program, len(options), words)
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if result:
                raise RuntimeError(f"NVRTC did not compile a kernel: {log or self._error(result)}")
            return self._output(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
        room = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{name}")(program, room))
        return room.raw

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError(f"NVRTC: {self._error(result)}")

    def _error(self, result: int) -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return str(self._library.nvrtcGetErrorString(result).decode())


@cache
def nvrtc() -> Nvrtc:
    """Load the NVRTC of torch's CUDA, or any where torch has none. Raise MissingDependencyError; names the wheel."""
    wanted = torch.version.cuda.split(".")[0] if torch.version.cuda else None
    names = sorted(path for path in nvrtc_files.installed() if wanted in (None, nvrtc_files.major_of(path.name)))
    found = [str(path) for path in names]
    if wanted:
        found.append(nvrtc_files.toolkit_library(wanted))
    for path in found:
        with suppress(OSError):
            return Nvrtc(path)
    cuda = f" of CUDA {torch.version.cuda}" if wanted else ""
    raise MissingDependencyError(
        f"the compiler NVRTC{cuda} is not installed", f"python -m pip install {_wheel(wanted)}"
    )


def _wheel(major: str | None) -> str:
    return f"nvidia-cuda-nvrtc-cu{major}" if major in ("11", "12") else "nvidia-cuda-nvrtc"


def why_not(capability: tuple[int, int]) -> MissingDependencyError | None:
    """Return why there is no compiler for a card, with the wheel to install; None where there is one."""
    try:
        compiler = nvrtc()
    except MissingDependencyError as error:
        return error
    if capability[0] * 10 + capability[1] in compiler.architectures():
        return None
    major, minor = compiler.version
    return MissingDependencyError(
        f"NVRTC {major}.{minor} does not know this card (compute capability {capability[0]}.{capability[1]})",
        f"python -m pip install --upgrade {_wheel(str(major))}, or a torch of a newer CUDA",
    )


def cubin(
    source: str, options: Sequence[str], capability: tuple[int, int], driver: int, own_instructions: bool = False
) -> bytes:
    """Compile a source for a card, or take it from the disk where it was compiled before.

    Args:
        driver: its version, as the driver says it. own_instructions: with those that no later card has.

    Raises:
        MissingDependencyError: NVRTC is missing, or older than the card; names the wheel.
    """
    unmet = why_not(capability)
    if unmet is not None:
        raise unmet
    compiler, card = nvrtc(), capability[0] * 10 + capability[1]
    every = [f"--gpu-architecture=sm_{card}{'a' if own_instructions else ''}", *options]
    key = hashlib.sha256("\0".join([source, *every, str(compiler.version), str(driver)]).encode()).hexdigest()
    folder = cubin_folder()
    path = folder / f"{key}.cubin" if folder else None
    if path:
        with suppress(OSError):
            return path.read_bytes()
    compiled, _ = compiler.compile(source, every)
    if path:
        keep(path, compiled)
    return compiled


def cubin_folder() -> Path | None:
    """Return where compiled kernels are kept; None when there is no home folder."""
    return cubins_folder(settings.load())
