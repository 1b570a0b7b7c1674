"""Runs a kernel in CUDA C++ on the CPU, thread by thread: slow, for what no compiler and no reference can tell."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_local.kernels.cuda_driver import Argument

HEADER = Path(__file__).with_name("host_cuda.h")
KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(.*?\)\s*(\w+)\((.*?)\)\s*{', re.DOTALL)
SHARED = re.compile(r"extern __shared__ __align__\(16\) u8 (\w+)\[\];")
FUNCTION = re.compile(r"^__device__ __forceinline__ [^;{}]*{.*?(?:}\n|^}\n)", re.DOTALL | re.MULTILINE)


def compiler() -> str | None:
    """A C++ compiler with fibers beside it, where there is one."""
    return shutil.which("g++")


def host_source(source: str) -> str:
    """A source whose functions in PTX are the header's, with ``launch`` beside its kernel."""
    found = KERNEL.search(source)
    assert found is not None
    name, parameters = found[1], re.sub(r"\s+", " ", found[2])
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    body = FUNCTION.sub(lambda function: "" if "asm" in function[0] else function[0], source)
    body = SHARED.sub(r"u8* \1 = shared_memory;", body).replace("#pragma unroll", "")
    return (
        f'#include "{HEADER}"\n{body}\n'
        f'extern "C" int launch(int blocks, int seed, {parameters}) {{\n'
        f"  return run_grid(blocks, THREADS, SHARED_BYTES, seed, [=] {{ {name}({names}); }});\n}}\n"
    )


@dataclass
class HostKernel:
    """Stands in for ``cuda_driver.Kernel``. ``seed``: of the pace of its warps; 0: they keep step."""

    library: ctypes.CDLL
    seed: int = 0

    @classmethod
    def of(cls, source: str, options: Sequence[str], folder: Path) -> HostKernel:
        """Compiled with the options of NVRTC's command line."""
        path = folder / f"{len(list(folder.iterdir()))}.cpp"
        path.write_text(host_source(source), encoding="utf-8")
        flags = ["-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
        library = path.with_suffix(".so")
        subprocess.run([compiler() or "g++", *flags, *options, str(path), "-o", str(library)], check=True)
        return cls(ctypes.CDLL(str(library)))

    def launch(self, blocks: int, arguments: Sequence[Argument]) -> None:
        """See ``cuda_driver.Kernel.launch``."""
        ended = self.library.launch(blocks, self.seed, *(_value(each) for each in arguments))
        assert ended, "threads wait for each other for ever"


def _value(argument: Argument) -> object:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_void_p(None) if argument is None else argument
