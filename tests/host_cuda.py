"""Runs a kernel in CUDA C++ on the CPU, thread by thread: slow, for what no compiler and no reference can tell."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from dflash_local.kernels.cuda_driver import Argument

HEADER = Path(__file__).with_name("host_cuda.h")
KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\(.*?\)\s*(\w+)\((.*?)\)\s*{', re.DOTALL)
SHARED = re.compile(r"extern __shared__ __align__\(\d+\) u8 (\w+)\[\];")
UNROLL = re.compile(r"#pragma unroll.*")
FLAGS = ("-O1", "-w", "-fno-strict-aliasing", "-fPIC")
FUNCTION = re.compile(r"^__device__ __forceinline__ [^;{}]*{.*?(?:}\n|^}\n)", re.DOTALL | re.MULTILINE)


def compiler() -> str | None:
    """A C++ compiler with fibers beside it, where there is one."""
    return shutil.which("g++")


def host_source(source: str) -> str:
    """What follows the header: a source whose functions in PTX are the header's, and ``launch`` beside its kernel."""
    found = KERNEL.search(source)
    assert found is not None
    name, parameters = found[1], re.sub(r"\s+", " ", found[2])
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    body = FUNCTION.sub(lambda function: "" if "asm" in function[0] else function[0], source)
    body = UNROLL.sub("", SHARED.sub(r"u8* \1 = shared_memory;", body))
    return (
        f"{body}\n"
        f'extern "C" int launch(int blocks, int seed, {parameters}) {{\n'
        f"  return run_grid(blocks, THREADS, SHARED_BYTES, seed, [=] {{ {name}({names}); }});\n}}\n"
    )


@dataclass
class HostKernel:
    """Stands in for ``cuda_driver.Kernel``. ``seed``: of the pace of its warps; 0: they keep step."""

    library: ctypes.CDLL
    seed: int = 0

    @classmethod
    def of(cls, source: str, options: Sequence[str]) -> HostKernel:
        """Compiled with the options of NVRTC's command line, once for all that ask for the same."""
        of_host = {"--fmad=false": "-ffp-contract=off"}
        return cls(_library(source, tuple(of_host.get(each, each) for each in options)))

    def launch(self, blocks: int, arguments: Sequence[Argument]) -> None:
        """See ``cuda_driver.Kernel.launch``."""
        ended = self.library.launch(blocks, self.seed, *(_value(each) for each in arguments))
        assert ended, "threads wait for each other for ever"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of what this process has compiled."""
    return tempfile.TemporaryDirectory(prefix="dflash-host-kernels-")


def _compile(*words: str | Path) -> None:
    subprocess.run([compiler() or "g++", *FLAGS, *map(str, words)], check=True)


@cache
def _compiled_header(flags: tuple[str, ...]) -> Path:
    """The header with what it includes, which alone takes as long to compile as a kernel."""
    copy = Path(_folder().name) / hashlib.sha256("\0".join(flags).encode()).hexdigest() / HEADER.name
    copy.parent.mkdir()
    shutil.copy(HEADER, copy)
    _compile(*flags, "-x", "c++-header", copy)
    return copy


@cache
def _library(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """A compiled header is not taken beside definitions on the command line: they stand in the file, behind it."""
    definitions = [option.removeprefix("-D") for option in options if option.startswith("-D")]
    flags = tuple(option for option in options if not option.startswith("-D"))
    header = _compiled_header(flags)
    lines = [f'#include "{header}"', *(f"#define {' '.join(each.split('=', 1))}" for each in definitions)]
    text = "\n".join([*lines, host_source(source)])
    path = header.with_name(f"{hashlib.sha256(text.encode()).hexdigest()}.cpp")
    path.write_text(text, encoding="utf-8")
    library = path.with_suffix(".so")
    _compile(*flags, "-shared", path, "-o", library)
    return ctypes.CDLL(str(library))


def _value(argument: Argument) -> object:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_void_p(None) if argument is None else argument
