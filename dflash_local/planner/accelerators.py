"""Which accelerator a run would use and how much of its memory is free, found without torch.

nvidia-smi, then rocm-smi, then Apple's unified memory. What cannot be read is None, never an error.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dflash_local.json_text import parse_json
from dflash_local.planner.hardware import run_probe
from dflash_local.planner.software import release, version_of
from dflash_local.planner.torch_build import too_old

RunProbe = Callable[[Sequence[str]], "str | None"]

MIB = 2**20
FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free", "mig.mode.current", "compute_cap")
OPTIONAL = 2  # of these, the last ones, are unknown to drivers that are too old for the torch we need
MIG_SLICE = re.compile(r"MIG (\d+g\.(\d+)gb\S*)\s+Device\s+\d+:\s+\(UUID:\s*(MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Describes a device a program may see. Memory in bytes, None where the driver does not report it.

    ``slice_of``: name of the whole GPU when this is a part of it (MIG). ``capability``: CUDA's version of the
    architecture, such as (8, 9). ``is_amd``: reported by rocm-smi.
    """

    index: int
    uuid: str
    name: str
    driver: str
    memory: int | None
    free: int | None
    slice_of: str | None = None
    capability: tuple[int, int] | None = None
    is_amd: bool = False


def nvidia(probe: RunProbe = run_probe) -> tuple[Accelerator, ...]:
    """List every NVIDIA device, MIG slices in place of the GPU they divide."""
    answer = None
    for fields in (FIELDS, FIELDS[:-OPTIONAL]):  # a driver that does not know every field refuses the whole question
        if answer is None:
            answer = probe(("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"))
    found: list[Accelerator] = []
    divided: set[int] = set()
    for line in (answer or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < len(FIELDS) - OPTIONAL or not cells[0].isdigit():
            continue
        index, uuid, name, driver, total, free, *extra = cells
        match = re.fullmatch(r"(\d+)\.(\d+)", extra[1]) if len(extra) > 1 else None
        capability = (int(match[1]), int(match[2])) if match else None
        found.append(Accelerator(int(index), uuid, name, driver, _mib(total), _mib(free), capability=capability))
        if extra[:1] == ["Enabled"]:
            divided.add(int(index))
    return _with_slices(found, divided, probe(("nvidia-smi", "-L"))) if divided else tuple(found)


def visible(devices: Sequence[Accelerator], value: str | None) -> tuple[Accelerator, ...]:
    """Return those a CUDA program sees under ``CUDA_VISIBLE_DEVICES``, in its order.

    CUDA stops at the first name it does not know, and takes one MIG slice at most.
    """
    if value is None:
        chosen = list(devices)
    else:
        chosen = []
        for word in (part.strip() for part in value.split(",")):
            by_index = [d for d in devices if word.isdigit() and d.index == int(word)]
            by_name = [d for d in devices if word.startswith(("GPU-", "MIG-")) and d.uuid.startswith(word)]
            if not by_index and not by_name:
                break
            chosen.append((by_index or by_name)[0])
    whole = [device for device in chosen if device.slice_of is None]
    return tuple(whole or chosen[:1])


def visible_value(indices: Sequence[int], value: str | None) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` with which a program sees those alone, in this order.

    Args:
        indices: as CUDA counts the devices that this program sees. value: of its own variable.
    """
    words = None if value is None else value.split(",")
    return ",".join(str(index) if words is None else words[index].strip() for index in indices)


def unusable(driver: str) -> str:
    """Say why the installed torch cannot use NVIDIA devices; empty when it can, or when neither is known."""
    torch = version_of("torch") or ""
    if "+cpu" in torch:
        return f"the installed torch {torch} is built without CUDA"
    return too_old(driver, cuda_major())


def has_rocm() -> bool:
    """Return False when the installed torch is one that cannot use AMD devices."""
    torch = version_of("torch")
    return torch is None or "+rocm" in torch


def cuda_major() -> int | None:
    """Return CUDA's major version of the installed packages."""
    local = re.search(r"\+cu(\d+)\d$", version_of("torch") or "")
    if local:
        return int(local.group(1))
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        found = release(version_of(package) or "")
        if found:
            return found[0]
    return None


def amd(probe: RunProbe = run_probe) -> tuple[Accelerator, ...]:
    """List AMD devices as rocm-smi does; a best effort, not tried on every version of it."""
    answer = probe(("rocm-smi", "--showmeminfo", "vram", "--showproductname", "--json"))
    try:
        cards = parse_json(answer or "{}")
    except ValueError:
        return ()
    found = []
    for key, card in cards.items() if isinstance(cards, Mapping) else ():
        if not isinstance(card, Mapping) or not re.fullmatch(r"card\d+", str(key)):
            continue
        texts = [str(card.get(f"VRAM Total {what}Memory (B)")) for what in ("", "Used ")]
        total, used = (int(text) if text.isdigit() else None for text in texts)
        name = str(card.get("Card Series") or card.get("Card series") or "AMD GPU")
        free = total - used if total is not None and used is not None else None
        found.append(Accelerator(int(str(key)[4:]), "", name, "", total, free, is_amd=True))
    return tuple(found)


def is_apple() -> bool:
    """Say whether this machine's GPU shares the main memory through MPS."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _with_slices(whole: Sequence[Accelerator], divided: set[int], listing: str | None) -> tuple[Accelerator, ...]:
    """Put MIG slices, which ``nvidia-smi -L`` lists below their GPU, in its place; what is free of one is not told.

    A divided GPU without a slice cannot be used, so it is left out.
    """
    slices: dict[int, list[Accelerator]] = {}
    gpus = {gpu.index: gpu for gpu in whole}
    current: Accelerator | None = None
    for line in (listing or "").splitlines():
        head, part = re.match(r"GPU (\d+):", line), MIG_SLICE.search(line)
        if head:
            current = gpus.get(int(head.group(1)))
        elif part and current is not None:
            size = int(part.group(2)) * 2**30
            label = f"{current.name} MIG {part.group(1)}"
            found = Accelerator(
                current.index, part.group(3), label, current.driver, size, None, current.name, current.capability
            )
            slices.setdefault(current.index, []).append(found)
    out: list[Accelerator] = []
    for gpu in whole:
        out += slices.get(gpu.index, []) if gpu.index in divided else [gpu]
    return tuple(out)


def _mib(cell: str) -> int | None:
    """Read a number of MiB; None for ``[N/A]`` and its kin (unified memory, MIG, missing rights)."""
    match = re.match(r"\d+", cell)
    return int(match.group()) * MIB if match else None
