"""Is the card what it should be: its read rate against its data sheet, and memory against the plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from dflash_local.bench.random_run import PROBE_BYTES, Place, bandwidth
from dflash_local.check.findings import Finding, State
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.engine.session import Session
from dflash_local.load_config import takes_several
from dflash_local.planner import hardware
from dflash_local.planner.cards import find_bandwidth
from dflash_local.terminal import byte_size

SLOW = 0.5  # of the data sheet's rate: less is not explained by how it is measured
SMALLEST_PROBE = 2**28  # bytes: more than any cache
OVER_PLAN = 1.05  # of the planned peak


@dataclass(frozen=True, slots=True)
class CardFigures:
    """What was measured; None is not known. ``peak_bytes``: that torch's allocator held; ``planned_bytes``: by plan."""

    name: str
    bytes_per_s: float | None
    specified_bytes_per_s: float | None
    peak_bytes: int
    planned_bytes: int | None


def check_card(session: Session, planned: int | None) -> Finding:
    """The finding on the card; ``planned``: bytes that torch's allocator holds at most by the plan, if one was made."""
    device = torch.device("cpu" if takes_several(session.facts.device) else session.facts.device)
    if device.type != "cuda":
        return Finding("card", "skipped", f"{session.facts.device}: rates and memory are measured on CUDA cards")
    name = torch.cuda.get_device_name(device)
    specified = find_bandwidth(name)
    runner = session.runner  # its peak is read before the probe takes more
    peak = runner.peak_bytes if isinstance(runner, FusedRunner) else torch.cuda.max_memory_allocated(device)
    figures = CardFigures(name, _rate(device), None if specified is None else specified * 1e9, peak, planned)
    return judged(figures, paging=hardware.is_wsl())


@torch.inference_mode()
def _rate(device: torch.device) -> float | None:
    """Bytes per second, the better of copying and reading; None where too little memory is free to measure it."""
    free, _ = torch.cuda.mem_get_info(device)
    probe = min(PROBE_BYTES, free // 4)
    if probe < SMALLEST_PROBE:
        return None
    with torch.cuda.device(device):
        found = max(bandwidth(Place(device, torch.float32, probe=probe)))
        torch.cuda.empty_cache()
    return found


def judged(found: CardFigures, paging: bool) -> Finding:
    """The finding on what was measured. ``paging``: the system may move a card's memory to the host (WSL2)."""
    rate, specified, planned = found.bytes_per_s, found.specified_bytes_per_s, found.planned_bytes
    lines, remedies = [found.name], []
    if rate is None:
        lines.append("too little memory is free to measure the read rate")
    elif specified is None:
        lines.append(f"reads {rate / 1e9:.0f} GB/s (no figure of its data sheet is known)")
    else:
        lines.append(f"reads {rate / 1e9:.0f} of {specified / 1e9:.0f} GB/s")
        if rate < SLOW * specified:
            causes = ["another program that uses the card", "a power or clock limit (nvidia-smi -q -d PERFORMANCE)"]
            causes.insert(0 if paging else 2, "memory paged to the host (WSL2 and Windows do so when the card is full)")
            causes.append("where weights lie in host memory, a PCIe slot of x4 or less")
            remedies.append(f"less than half of its rate; likely causes: {'; '.join(causes)}")
    lines.append(f"peak {byte_size(found.peak_bytes)}" + (f" of {byte_size(planned)} planned" if planned else ""))
    if planned and found.peak_bytes > OVER_PLAN * planned:
        remedies.append("it took more memory than planned: give a shorter --context, and report the figures")
    state: State = "warning" if remedies else "ok"
    return Finding("card", state, "; ".join(lines), "; ".join(remedies), asdict(found))
