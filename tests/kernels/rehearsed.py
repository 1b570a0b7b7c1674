"""Rehearses a card without a GPU, and prints in JSON what each compiler makes there. Usage: rehearsed.py CARD FOLDER"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_local import child_process
from dflash_local.kernels import fragment_gemm, jit, nvrtc, split_kv, triton_trial
from dflash_local.kernels.cuda_driver import LoadedKernel
from dflash_local.worker.process import ChildLimits, WorkerProcess
from tests.cuda_cards import SHARED_MEMORY
from tests.gpu.rehearsal import CARDS, NATIVE, rehearse
from tests.kernels.few_rows import FORMATS
from tests.kernels.test_nvrtc import DRIVER, on_meta

COMPILE = "from dflash_local.kernels import nvrtc; made = nvrtc.cubin('__global__ void f() {}', [], CAPABILITY, 13000)"
CPU = torch.device("cpu")


def h100(_device: object = None) -> SimpleNamespace:
    """What torch says of one, in part."""
    memory = {"shared_memory_per_block_optin": 227 * 1024, "L2_cache_size": 50 * 2**20, "total_memory": 80 * 2**30}
    return SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, **memory)


def target(ptx: bytes | str) -> str:
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    return text.partition(".target ")[2].split()[0]


def refuse(make: Any, *words: Any) -> str:
    """Return why a kernel is refused."""
    try:
        make(*words)
    except AssertionError as error:
        return str(error)
    return ""


def triton_kernel(capability: int) -> Any:
    source = ASTSource(fn=triton_trial._add_one, signature={"numbers": "*i32"}, constexprs={})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def skinny_gemm(capability: tuple[int, int]) -> bytes:
    """PTX of a kernel with codes of eight bits, which cards differ in."""
    weight = on_meta(4096, 4096, FORMATS["fp8"])
    config = fragment_gemm.candidates(weight, False, 8, SHARED_MEMORY[89] * 1024)[0]
    options = fragment_gemm.compile_options(weight.format, 4096, config, 8, False)
    return nvrtc.cubin(fragment_gemm.source_text(fragment_gemm.SOURCE), options, capability, DRIVER)


def children(folder: Path, capability: tuple[int, int]) -> list[str]:
    """Targets that processes of either kind compile for."""
    compiled = COMPILE.replace("CAPABILITY", str(capability))
    handler = folder / "trial_worker.py"
    handler.write_text(f"def answer(data):\n    {compiled}\n    return made\n", encoding="utf-8")
    worker = WorkerProcess(handler, ("dflash_local", "torch"), environ=dict(os.environ), writes=True)
    answer = worker.request(b"", ChildLimits(60.0))
    worker.close()
    line = [sys.executable, "-c", f"{compiled}; print(made.decode())", "kernels.card_probe"]
    return [target(answer), target(child_process.run(line, capture_output=True, text=True).stdout)]


def main(name: str, folder: Path) -> None:
    torch.cuda.get_device_properties = h100  # type: ignore[assignment]
    rehearsal, card = rehearse(name), CARDS[name]
    capability, device = (card.major, card.minor), torch.device("cuda", 0)
    found = split_kv.device_properties(device)
    kernel = triton_kernel(rehearsal.arch)
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 9.0'\n", encoding="utf-8")
    smi.chmod(0o700)
    result = {
        "name": torch.cuda.get_device_name(device),
        "memory": torch.cuda.get_device_properties(device).total_memory,
        "properties": [found.shared_memory, found.num_sms, found.compute_capability, found.l2_cache_size],
        "capability": torch.cuda.get_device_capability(device),
        "overlaps": jit._overlaps(0),
        "triton": [target(kernel.asm["ptx"]), NATIVE in kernel.asm["cubin"][48:50]],  # flags of its ELF header
        "nvrtc": target(skinny_gemm(capability)),
        "refused": [
            refuse(triton_kernel, NATIVE),
            refuse(LoadedKernel, b"\x7fELF", "a binary", 32, 0, CPU),
            refuse(rehearsal.check, f".target sm_{rehearsal.arch} wgmma.fence", "a product"),
        ],
        "children": children(folder, capability),
        "smi": child_process.run([str(smi)], capture_output=True, text=True).stdout,
        "counts": rehearsal.counts(),
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
