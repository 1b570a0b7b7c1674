"""The hardware probe: accelerators, driver, memory and disk, as plain values.

Says what is there and why something could not be read; judges nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_local import child_process

SMI_TIMEOUT_S = 5.0  # nvidia-smi hangs for minutes on a GPU that has fallen off the bus
CGROUP = Path("/sys/fs/cgroup")
KERNEL = Path("/proc/version")
PROCESSORS = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # instructions that multiply it
WSL_PROBES = "/usr/lib/wsl/lib"  # Windows' driver puts nvidia-smi there, which is not always on PATH


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describes one CUDA (or ROCm) device as torch sees it. Memory in bytes."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Describes the installed torch. ``cuda``, ``hip`` and ``xpu`` (Intel) are the versions it was built for, None for
    neither.

    ``error`` says why torch, or its devices, could not be used; empty when all went well.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None
    gpus: tuple[Gpu, ...] = ()
    mps: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """Holds what nvidia-smi says: the driver's version and the name of each GPU."""

    version: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Describes main memory in bytes, already cut to the limit of the container, if there is one."""

    total: int
    available: int
    limited: bool


@dataclass(frozen=True, slots=True)
class Folder:
    """Describes a folder that exists or could be made: may we write there, and how many bytes are free."""

    path: Path
    writable: bool
    free: int


def probe_torch() -> TorchFacts | None:
    """Return what torch offers; None when it is not installed.

    The one place of the torch-free rooms that imports it: two to four seconds.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a driver too old is told once, in ``error``
            import torch
    except ModuleNotFoundError as error:
        return None if error.name == "torch" else TorchFacts("", error=str(error))
    except (ImportError, OSError, RuntimeError) as error:
        return TorchFacts("", error=str(error))  # a library torch was linked to is missing or of another version
    gpus: tuple[Gpu, ...] = ()
    problem = ""
    if torch.version.cuda or torch.version.hip:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            problem = str(warned[0].message) if warned and not count else ""
            for found in map(torch.cuda.get_device_properties, range(count)):
                gpus += (Gpu(str(found.name), int(found.total_memory), f"{found.major}.{found.minor}"),)
        except (RuntimeError, AssertionError) as error:
            problem = str(error)
    mps = getattr(torch.backends, "mps", None)
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        xpu=getattr(torch.version, "xpu", None),
        gpus=gpus,
        mps=bool(mps and mps.is_available()),
        error=problem,
    )


def find_probe(name: str) -> str | None:
    """Return the path of a program that lists devices; None where it is not installed."""
    return child_process.find_program(name) or child_process.find_program(f"{WSL_PROBES}/{name}")


def run_probe(command: Sequence[str]) -> str | None:
    """Return the output of a probe; None when it is not installed, fails or hangs."""
    path = find_probe(command[0])
    if path is None:
        return None
    try:
        done = child_process.run(
            [path, *command[1:]], capture_output=True, text=True, errors="replace", timeout=SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return str(done.stdout) if done.returncode == 0 else None


def is_wsl(kernel: Path = KERNEL) -> bool:
    """Return True in a Linux that Windows runs (WSL2)."""
    try:
        return "microsoft" in kernel.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def nvidia_driver() -> Driver | None:
    """Return the NVIDIA driver and its GPUs, read without torch; None when there is none."""
    answer = run_probe(("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"))
    rows = [line.partition(",") for line in (answer or "").splitlines() if "," in line]
    if not rows:
        return None
    return Driver(version=rows[0][0].strip(), gpus=tuple(name.strip() for _, _, name in rows))


def processor() -> str:
    """Return the CPU's name, as the system reports it."""
    if not PROCESSORS.exists():
        return platform.processor() or platform.machine()
    return _of_processor("model name") or platform.machine()


def computes_bfloat16() -> bool:
    """Return True on a CPU with instructions for bfloat16, as Linux tells it of x86; False where nothing tells."""
    return bool(BFLOAT16 & set(_of_processor("flags").split()))


def _of_processor(name: str) -> str:
    """Return a field of the first processor; empty where it is not told."""
    try:
        lines = PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def memory(cgroup: Path = CGROUP) -> Memory:
    """Return main memory of the machine, or of the container this runs in when that has less."""
    import psutil  # `dflash --help` loads this module and must stay quick

    machine = psutil.virtual_memory()
    limit, used = _container_limit(cgroup)
    if limit is None or limit >= machine.total:
        return Memory(machine.total, machine.available, limited=False)
    return Memory(limit, max(0, min(machine.available, limit - used)), limited=True)


def _container_limit(cgroup: Path) -> tuple[int | None, int]:
    """Read the cgroup's limit and its use without file cache that can be given back, in bytes."""
    newer = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    older = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    for folder, (limit_name, used_name, stat_name, cached) in ((cgroup, newer), (cgroup / "memory", older)):
        limit = _numbers(folder / limit_name).get("")
        if limit is not None:
            used = _numbers(folder / used_name).get("", 0) - _numbers(folder / stat_name).get(cached, 0)
            return limit, max(0, used)
    return None, 0


def _numbers(path: Path) -> dict[str, int]:
    """Read the numbers of a file by the names before them; the name of one that stands alone is empty."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {" ".join(words[:-1]): int(words[-1]) for words in lines if words and words[-1].isdigit()}


def folder(path: Path) -> Folder:
    """Return what can be done with a folder; one that does not exist is judged by the nearest one above it."""
    above = path
    while not above.exists() and above != above.parent:
        above = above.parent
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    return Folder(path, writable, shutil.disk_usage(above).free)
