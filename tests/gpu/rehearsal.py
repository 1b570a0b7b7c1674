"""A rehearsal of a GeForce card on an H100: its kernels, compiled for compute capability 8.6 or 8.9 alone, its shared
memory, and launches of its size. Left as they are: the products of torch's libraries, the size of the memory, speeds.
Usage: python -m tests.gpu.rehearsal CARD MODULE [ARGUMENT...]; pytest -m gpu tests/gpu --card CARD"""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = str(Path(__file__).resolve().parents[2])
NATIVE = 90  # of the H100, whose assembler takes PTX of the older cards
FORBIDDEN = ("wgmma", "cp.async.bulk", "griddepcontrol", ".target sm_90")
MIB = 2**20
# Processes that use the card; others, such as those of tokenizers, need not load torch.
USERS = ("trial_worker.py", "app.engine_process", "kernels.card_probe", "bench.baselines")


class Card(NamedTuple):
    """``shared_memory``: bytes of a program."""

    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int = 99 * 1024


CARDS = {"RTX 3090": Card(8, 6, 82, 6 * MIB), "RTX 4090": Card(8, 9, 128, 72 * MIB)}


class Properties:
    """What torch says of the H100, but for what a card has of its own."""

    def __init__(self, found: Any, name: str) -> None:
        assert found.major * 10 + found.minor == NATIVE, f"{found.name} cannot rehearse: this needs an H100"
        self._found, self.name = found, f"{name} rehearsed on {found.name}"
        vars(self).update(CARDS[name]._asdict())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


class Rehearsal:
    """What was loaded, a line for each kernel in a file that all processes share. ``ledger``: the file of a parent."""

    def __init__(self, name: str, ledger: str | None) -> None:
        self.name, self.card = name, CARDS[name]
        self.arch = self.card.major * 10 + self.card.minor
        self._own = None if ledger else tempfile.NamedTemporaryFile(prefix="rehearsal-")  # noqa: SIM115
        self.ledger = ledger or str(self._own and self._own.name)

    def check(self, ptx: str, kernel: str) -> None:
        """Raise AssertionError at the code of another card."""
        found = [word for word in FORBIDDEN if word in ptx]
        if found or f".target sm_{self.arch}" not in ptx:
            self.note(f"refused {kernel}")  # whoever tries a kernel takes the error for the kernel's
            raise AssertionError(f"{kernel} is not a kernel of the {self.name}: {found or 'another target'}")

    def note(self, line: str) -> None:
        with open(self.ledger, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def counts(self) -> Counter[str]:
        """Count kernels by their compiler, ``refused`` those that were not loaded."""
        return Counter(line.split()[0] for line in Path(self.ledger).read_text(encoding="utf-8").splitlines())

    def summary(self) -> str:
        found = self.counts()
        loaded = f"loaded {found['Triton']} kernels of Triton and {found['NVRTC']} of NVRTC"
        return f"{self.name} rehearsed: {loaded}, refused {found['refused']}, in all processes"


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put a function in place of another one, which it gets as its first argument."""
    inner = getattr(owner, name)
    setattr(owner, name, lambda *words, **options: wrapper(inner, *words, **options))


def rehearse(name: str, ledger: str | None = None) -> Rehearsal:
    """Make this process, and those that it starts, do what they would on a card; before any kernel is launched."""
    rehearsal = Rehearsal(name, ledger)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its processes would compile for the H100
    import torch

    assert not torch.cuda.is_initialized(), "this process knows the H100 already"
    # get_device_name and get_device_capability ask it, too
    wrap(torch.cuda, "get_device_properties", lambda inner, *words, **named: Properties(inner(*words, **named), name))
    _rehearse_triton(rehearsal)
    _rehearse_nvrtc(rehearsal)
    _rehearse_children(rehearsal)
    return rehearsal


def _rehearse_triton(rehearsal: Rehearsal) -> None:
    """Compile to PTX for the card, which is assembled for the H100."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver, CudaUtils
    from triton.compiler.compiler import CompiledKernel

    def assemble(inner: Any, backend: Any, ptx: str, metadata: Any, options: Any, _capability: int) -> Any:
        rehearsal.check(ptx, metadata["name"])
        return inner(backend, ptx, metadata, options, NATIVE)

    def load(inner: Any, kernel: Any) -> None:
        if kernel.module is None:
            rehearsal.check(kernel.asm["ptx"], kernel.name)
            inner(kernel)
            rehearsal.note(f"Triton {kernel.name}")

    def ask(inner: Any, utils: Any) -> None:
        inner(utils)
        card = rehearsal.card
        own = {"max_shared_mem": card.shared_memory_per_block_optin, "multiprocessor_count": card.multi_processor_count}
        wrap(utils, "get_device_properties", lambda inner, device: inner(device) | own)

    wrap(CudaDriver, "get_current_target", lambda _inner, _driver: GPUTarget("cuda", rehearsal.arch, 32))
    wrap(CudaUtils, "__init__", ask)
    wrap(CUDABackend, "make_cubin", assemble)
    wrap(CUDABackend, "hash", lambda inner, backend: f"{inner(backend)}-for-{NATIVE}")  # a name in Triton's cache
    wrap(CompiledKernel, "_init_handles", load)


def _rehearse_nvrtc(rehearsal: Rehearsal) -> None:
    """Compile to PTX for the card, which the driver assembles."""
    from dflash_local.kernels import cuda_driver, nvrtc

    def compile_ptx(inner: Any, compiler: Any, source: str, options: Sequence[str]) -> Any:
        return inner(compiler, source, [option.replace("=sm_", "=compute_") for option in options])

    def output(inner: Any, compiler: Any, program: Any, name: str) -> Any:
        return inner(compiler, program, "PTX" if name == "CUBIN" else name)

    def load(inner: Any, kernel: Any, code: bytes, name: str, threads: int, shared_bytes: int, device: Any) -> None:
        rehearsal.check(code.decode(errors="replace"), name)
        assert shared_bytes <= rehearsal.card.shared_memory_per_block_optin, f"{name} takes {shared_bytes} bytes"
        inner(kernel, code, name, threads, shared_bytes, device)
        rehearsal.note(f"NVRTC {name}")

    wrap(nvrtc.Nvrtc, "compile", compile_ptx)
    wrap(nvrtc.Nvrtc, "_output", output)
    # the option makes it another name in the folder of compiled kernels than a true card's
    wrap(nvrtc, "cubin", lambda inner, source, options, *words: inner(source, [*options, "-DREHEARSED"], *words))
    wrap(cuda_driver.LoadedKernel, "__init__", load)


def _rehearse_children(rehearsal: Rehearsal) -> None:
    """Have processes that use the card rehearse, too, and nvidia-smi name the card as torch does."""
    from dflash_local import child_process

    path = [ROOT, *filter(None, sys.path)]
    rehearsed = (
        f"import sys; sys.path[:] = {path!r}; from tests.gpu.rehearsal import rehearse; "
        f"rehearse({rehearsal.name!r}, {rehearsal.ledger!r}); "
    )
    script = "import runpy; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

    def command(inner: Any, argv: Sequence[str]) -> list[str]:
        python, *words = inner(argv)
        if not any(user in word for user in USERS for word in words):
            return [python, *words]
        if words[0] == "-c":
            return [python, "-c", rehearsed + words[1], *words[2:]]
        return [python, words[0], "-c", rehearsed + script, *words[1:]]  # -I, and a file

    def run(inner: Any, argv: Sequence[str], *words: Any, **options: Any) -> Any:
        done = inner(argv, *words, **options)
        if Path(argv[0]).name == "nvidia-smi" and isinstance(done.stdout, str):
            named = re.sub(r"NVIDIA [^,\n(]*", rf"{rehearsal.name} rehearsed on \g<0>", done.stdout)
            done.stdout = re.sub(r", 9\.0$", f", {rehearsal.card.major}.{rehearsal.card.minor}", named, flags=re.M)
        return done

    wrap(child_process, "_found", command)
    wrap(child_process, "run", run)


def main(name: str, module: str, *arguments: str) -> None:
    """Run a module as ``python -m`` would. Raise AssertionError where it wanted a kernel of another card."""
    rehearsal = rehearse(name)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        print(rehearsal.summary(), file=sys.stderr)
        assert not rehearsal.counts()["refused"], "see above"


if __name__ == "__main__":
    main(*sys.argv[1:])
