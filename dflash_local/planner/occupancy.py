"""How full the memory is that a loaded pair lives in, read while it runs. Knows devices by name, no models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_local.planner import accelerators, hardware
from dflash_local.planner.accelerators import RunProbe


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Memory in bytes, None where it cannot be read.

    Attributes:
        whose: what ``used`` counts: one process of a machine without GPU, all that lies on a GPU.
    """

    used: int | None = None
    total: int | None = None
    whose: str = ""


def occupancy(
    device: str, environ: Mapping[str, str], server: int | None = None, probe: RunProbe = accelerators.run_probe
) -> Occupancy:
    """What is used now of the memory of ``device``; may take as long as nvidia-smi does.

    Args:
        device: as a session names it: cpu, cuda, cuda:N or balanced. Of any other one nothing is known.
        environ: for ``CUDA_VISIBLE_DEVICES``; the caller owns the environment.
        server: the process that holds the pair when this one does not; its own variables count then.
    """
    if device == "cpu":
        return _main_memory(server)
    if device == "balanced" or device.partition(":")[0] == "cuda":
        return _gpus(device, environ if server is None else _variables(server), probe)
    return Occupancy()


def _main_memory(server: int | None) -> Occupancy:
    import psutil  # `dflash --help` must stay quick

    try:
        used = int(psutil.Process(server if server is not None else os.getpid()).memory_info().rss)
    except psutil.Error:  # gone, or another user's
        return Occupancy()
    return Occupancy(used, hardware.memory().total, "this process" if server is None else "the engine")


def _gpus(device: str, environ: Mapping[str, str], probe: RunProbe) -> Occupancy:
    seen = accelerators.visible(accelerators.nvidia(probe), environ.get("CUDA_VISIBLE_DEVICES"))
    seen = seen or accelerators.amd(probe)
    number = device.partition(":")[2] or "0"
    if device != "balanced":
        seen = seen[int(number) :][:1] if number.isdecimal() else ()
    if not seen or any(gpu.memory is None or gpu.free is None for gpu in seen):
        return Occupancy()
    used = sum((gpu.memory or 0) - (gpu.free or 0) for gpu in seen)
    return Occupancy(used, sum(gpu.memory or 0 for gpu in seen), "the GPU" if len(seen) == 1 else f"{len(seen)} GPUs")


def _variables(process: int) -> Mapping[str, str]:
    import psutil

    try:
        return dict(psutil.Process(process).environ())
    except (psutil.Error, OSError):
        return {}
