"""How full the memory is that a loaded pair lives in, read while it runs. Knows devices by name, no models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_local.load_config import BALANCED, gpus_named
from dflash_local.planner import accelerators, hardware
from dflash_local.planner.accelerators import RunProbe


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Describes memory in bytes, None where it cannot be read.

    Attributes:
        whose: what ``used`` counts: one process of a machine without GPU, all that lies on a GPU.
    """

    used: int | None = None
    total: int | None = None
    whose: str = ""


def occupancy(
    device: str, environ: Mapping[str, str], server: int | None = None, probe: RunProbe = accelerators.run_probe
) -> Occupancy:
    """Read what is used now of the memory of ``device``; may take as long as nvidia-smi does.

    Args:
        device: as a session names it. Of any other one than the processor and CUDA's nothing is known.
        environ: for ``CUDA_VISIBLE_DEVICES``; the caller owns the environment.
        server: the process that holds the pair when this one does not; its own variables count then.
    """
    import psutil  # `dflash --help` must stay quick

    named = gpus_named(device)
    if device == "cpu":
        try:
            used = int(psutil.Process(server if server is not None else os.getpid()).memory_info().rss)
        except psutil.Error:  # gone, or another user's
            return Occupancy()
        return Occupancy(used, hardware.memory().total, "this process" if server is None else "the engine")
    if not named and device != BALANCED:
        return Occupancy()
    try:
        environ = environ if server is None else psutil.Process(server).environ()
    except (psutil.Error, OSError):
        environ = {}
    seen = accelerators.visible(accelerators.nvidia(probe), environ.get("CUDA_VISIBLE_DEVICES"))
    seen = seen or accelerators.amd(probe)
    if named:
        seen = tuple(seen[index] for index in named if index < len(seen))
    if not seen or any(gpu.memory is None or gpu.free is None for gpu in seen):
        return Occupancy()
    used = sum((gpu.memory or 0) - (gpu.free or 0) for gpu in seen)
    return Occupancy(used, sum(gpu.memory or 0 for gpu in seen), "the GPU" if len(seen) == 1 else f"{len(seen)} GPUs")
