"""Judges what the probes found of this machine and installation, and says what to do about each problem.

A missing GPU is information, not a problem: everything runs on the CPU, slowly.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_local import __version__, settings
from dflash_local.app.models import OVERLAY, install_status, model_store, registry
from dflash_local.errors import SettingsError
from dflash_local.planner import hardware, machine, software, torch_build
from dflash_local.planner.hardware import Driver, TorchFacts
from dflash_local.planner.software import OURS, Compiler, VersionCommand
from dflash_local.settings import Settings
from dflash_local.store.paths import chats_folder
from dflash_local.tables import amount

Status = Literal["ok", "info", "problem"]
GIB = 2**30
LITTLE_MEMORY = 2 * GIB  # torch and the bundled pair take about one
LITTLE_DISK = 2 * GIB
OTHER_MAKER = "the kernels of the fused engine are for NVIDIA's cards"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. ``fix`` is what to do, empty when there is nothing to do."""

    name: str
    status: Status
    value: str
    fix: str = ""


def checked() -> tuple[Mapping[str, str], list[Check]]:
    """The environment, but for colours empty where the settings cannot be read, and every check under it."""
    try:
        user, check = settings.load(), Check("settings", "ok", "read")
    except SettingsError as error:
        user, check = settings.load({"NO_COLOR": "1"}), Check("settings", "problem", error.message, error.hint)
    settings.quiet_libraries()
    return user.environ, [*examine(user), check]


def examine(user: Settings) -> Iterator[Check]:
    """Every check but that of the settings, in the order they are shown."""
    environ = user.environ
    torch = hardware.probe_torch()
    yield check_python(sys.version_info[:2])
    yield Check(OURS, "ok", f"{__version__} in {Path(__file__).parents[1]}")
    if hardware.is_wsl():
        yield Check("system", "info", "WSL2, a Linux that Windows runs", "docs/install.md says what to set on Windows")
    yield check_torch(torch)
    if torch is not None:
        yield check_gpu(torch, hardware.nvidia_driver(), environ.get("CUDA_VISIBLE_DEVICES"))
    if torch is not None and (torch.gpus or torch.cuda):
        yield check_measured({name: software.version_of(name) for name in software.MEASURED})
    yield check_device(machine.this_machine("auto", environ))
    gpu = bool(torch and torch.gpus)
    reason = "GPU kernels written in it cannot be built" if gpu else "not needed without a GPU"
    yield check_optional("triton", software.version_of("triton"), reason, "pip install triton" if gpu else "")
    if torch is not None and torch.gpus and not torch.hip:
        yield check_nvrtc(torch.gpus[0].capability)
    yield check_compiler(software.c_compiler(environ.get("CC")), gpu)
    yield check_transformers(software.version_of("transformers"))
    quantizers, install = "--quantize bnb-int8 and bnb-nf4 need it", "pip install bitsandbytes"
    yield check_optional("bitsandbytes", software.version_of("bitsandbytes"), quantizers, install)
    fla = software.version_of("flash-linear-attention") or software.version_of("fla-core")
    yield check_optional("fla", fla, "not needed, the Gated-DeltaNet layers here are our own")
    yield check_requirements(software.missing_requirements())
    yield check_memory(hardware.memory())
    yield from check_folders(user.hub.cache, user.data_dir)
    yield check_chats(user)
    yield check_models(user)
    yield check_command(software.command("dflash"))


def check_python(version: tuple[int, int]) -> Check:
    if version < software.OLDEST_PYTHON:
        return Check("python", "problem", platform.python_version(), "use Python 3.10 or later")
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_torch(torch: TorchFacts | None) -> Check:
    wanted = ".".join(map(str, software.OLDEST_TORCH))
    if torch is None:
        return Check("torch", "problem", "not installed", f"pip install 'torch>={wanted}'")
    if not torch.version:
        return Check("torch", "problem", f"does not import: {torch.error}", "install torch again")
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"
    if torch.hip:
        build = f"built for ROCm {torch.hip}"
    elif torch.xpu:
        build = f"built for Intel GPUs ({torch.xpu})"
    if software.release(torch.version) < software.OLDEST_TORCH:
        return Check("torch", "problem", f"{torch.version}, too old", f"pip install -U 'torch>={wanted}'")
    return Check("torch", "ok", f"{torch.version}, {build}")


def check_measured(versions: Mapping[str, str | None]) -> Check:
    """Are the libraries that decide a GPU's speed those that this program's figures come from. Never a problem."""
    differences = []
    for name, (version, measured) in software.not_measured(versions).items():
        newer = software.release(version) > measured
        dotted = ".".join(map(str, measured))
        differences.append(f"{name} {version} is {'newer' if newer else 'older'} than what was measured ({dotted})")
    if not differences:
        return Check("measured with", "ok", "the GPU figures come from these versions")
    fix = "pip install -c constraints-cuda.txt takes the measured versions"
    return Check("measured with", "info", f"not measured: {'; '.join(differences)}", fix)


def check_gpu(torch: TorchFacts, driver: Driver | None, visible: str | None) -> Check:
    """What models can run on, and why a GPU that is there cannot be used."""
    if torch.gpus:
        cards = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB, compute {gpu.capability})" for gpu in torch.gpus)
        if torch.hip:
            return Check("gpu", "info", f"{cards}, of AMD; {OTHER_MAKER}: the reference engine runs there, slowly")
        return Check("gpu", "ok", f"{cards}; driver {driver.version}" if driver else cards)
    if torch.mps:
        return Check("gpu", "ok", "Apple GPU through MPS")
    if driver is None and torch.xpu:
        return Check("gpu", "info", f"this torch is built for Intel's; {OTHER_MAKER}: models run on the CPU")
    if driver is None:
        return Check("gpu", "info", "none found; models run on the CPU")
    found = torch_build.why_unusable(torch, driver, visible)
    if found is None:
        there = f"{', '.join(driver.gpus)} with driver {driver.version}"
        return Check("gpu", "info", f"{there}, hidden by CUDA_VISIBLE_DEVICES={visible!r}")
    return Check("gpu", "problem", found.why, found.fix)


def check_device(where: machine.Machine) -> Check:
    """What ``--device auto`` takes and why, and what is free there: what others use is subtracted in every plan."""
    if where.kind != "cuda":
        return Check("device", "info", f"{where.name}: {where.why}")
    free = f"{where.free / GIB:.1f} GiB free of {where.memory / GIB:.1f} GiB"
    return Check("device", "ok", f"{where.device}, {where.name}: {where.why}; {free}, and plans count with that")


def check_optional(name: str, version: str | None, without: str, fix: str = "") -> Check:
    """A package that not everybody needs, and what comes of its absence."""
    return Check(name, "ok", version) if version else Check(name, "info", f"not installed; {without}", fix)


def check_nvrtc(capability: str) -> Check:
    """What compiles kernels for quantised weights and mixtures of experts; what is known of them on the first card."""
    from dflash_local.kernels import kernel_record, nvrtc

    major, minor = map(int, capability.split("."))
    unmet = nvrtc.why_not((major, minor))
    if unmet is not None:
        slow = "quantised weights go through Triton, which is slow, and mixtures of experts to the reference engine"
        return Check("nvrtc", "info", f"{unmet.message}; {slow}", unmet.hint)
    version = ".".join(map(str, nvrtc.nvrtc().version))
    try:
        verdicts = kernel_record.record_of("cuda:0").verdicts.values()
    except SettingsError:  # told by itself; without them it is not known where the record lies
        return Check("nvrtc", "ok", version)
    bad = sum(verdict != "right" for verdict in verdicts)
    return Check("nvrtc", "ok", f"{version}; {len(verdicts)} kernels tried on this card, {bad} of no use")


def check_compiler(compiler: Compiler, gpu: bool) -> Check:
    """Triton compiles its launchers with the C compiler and Python's headers."""
    unmet: Status = "problem" if gpu else "info"
    if compiler.path is None:
        fix = software.INSTALL_COMPILER if gpu else ""
        return Check("c compiler", unmet, "none found; Triton needs one for GPU kernels", fix)
    if not compiler.headers:
        fix = software.INSTALL_HEADERS if gpu else ""
        return Check("c compiler", unmet, f"{compiler.path}, but Python.h is missing, which Triton needs", fix)
    return Check("c compiler", "ok", f"{compiler.path}, Python.h found")


def check_transformers(version: str | None) -> Check:
    """The reference targets are transformers models of a tested range."""
    low, high = (".".join(map(str, part)) for part in (software.OLDEST_TRANSFORMERS, software.TRANSFORMERS_BELOW))
    wanted = f"pip install 'transformers>={low},<{high}'"
    if version is None:
        return Check("transformers", "problem", "not installed", wanted)
    if not software.OLDEST_TRANSFORMERS <= software.release(version) < software.TRANSFORMERS_BELOW:
        return Check("transformers", "problem", f"{version}, outside {low} to below {high}", wanted)
    return Check("transformers", "ok", version)


def check_requirements(missing: tuple[str, ...]) -> Check:
    if missing:
        return Check("requirements", "problem", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("requirements", "ok", "all installed")


def check_memory(memory: hardware.Memory) -> Check:
    """Main memory, which also bounds what fits on the CPU."""
    limit = ", the container's limit" if memory.limited else ""
    value = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB{limit}"
    if memory.available < LITTLE_MEMORY:
        return Check("memory", "problem", value, "close other programs: torch and the bundled pair need about 1 GiB")
    return Check("memory", "ok", value)


def check_folders(cache: Path | None, data: Path | None) -> Iterator[Check]:
    """Where models are kept and where chats are kept: writable, and with room."""
    if cache is not None:
        folder = hardware.folder(cache)
        if not folder.writable:
            yield Check("model cache", "problem", f"{cache} cannot be written", "set HF_HOME to a folder of yours")
        else:
            yield Check("model cache", "ok", str(cache))
        free = f"{folder.free / GIB:.1f} GiB free for models"
        low = folder.free < LITTLE_DISK
        yield Check("disk", "problem" if low else "ok", free, "free some space or move HF_HOME" if low else "")
    if data is None:
        yield Check("data folder", "info", "none: no home folder, so chats are not kept", "set DFLASH_HOME")
    elif not hardware.folder(data).writable:
        yield Check("data folder", "problem", f"{data} cannot be written", "set DFLASH_HOME to a folder of yours")
    else:
        yield Check("data folder", "ok", str(data))


def check_chats(user: Settings) -> Check:
    """Where chats are kept, and how to keep none."""
    folder = chats_folder(user)
    if not user.history or folder is None:
        return Check("chats", "info", "not kept")
    return Check("chats", "ok", f"{folder}; dflash chat --no-history, or DFLASH_HISTORY=off, keeps none")


def check_command(command: VersionCommand) -> Check:
    """Who answers to ``dflash``: other packages use that name too, so ``dflash-local`` always works."""
    name = f"command {command.name}"
    ours = command.here.with_name(f"{OURS}{command.here.suffix}")
    always = f"use {ours if command.here.exists() else 'python -m dflash_local'}, which is always this program"
    others = [provider for provider in command.providers if provider != OURS]
    if command.here.exists() and not command.is_ours:
        owner = f" from {', '.join(others)}" if others else ""
        return Check(name, "problem", f"{command.here} is another program{owner}", always)
    if others:
        return Check(name, "problem", f"also provided by {', '.join(others)}; the last one installed wins", always)
    if command.found is not None and not command.found_here and not software.starts_us(command.found):
        module = software.started_module(command.found).partition(".")[0]
        what = f"another program{f', {module}' if module else ''}"
        here = f"; ours is {command.here}" if command.here.exists() else ""
        return Check(name, "problem", f"this shell runs {command.found}, which is {what}{here}", always)
    if not command.here.exists():
        return Check(name, "info", "not installed, running from source", "python -m dflash_local does the same")
    if command.found is None:
        return Check(name, "info", f"{command.here} is not on PATH", "activate the environment or use the full path")
    if command.found_here:
        return Check(name, "ok", str(command.found))
    return Check(name, "info", f"{command.found} is another installation of {OURS}; this one is {command.here}")


def check_models(user: Settings) -> Check:
    try:
        store = model_store(user)
        found = [install_status(row, store) for row in registry(user).rows]
    except SettingsError as error:
        return Check("models", "problem", error.message, error.hint)
    here = [item for item in found if item.state == "local"]
    parts = [item for item in found if item.state == "partial"]
    known = sum(not item.row.bundled for item in found)
    value = f"{len(here)} of {known} pairs here ({amount(sum(item.size for item in here))})"
    value = f"{value}, {len(parts)} in part" if parts else value
    own = user.config_dir / OVERLAY if user.config_dir else None
    if own is not None:
        changed = sum(item.row.overridden for item in found)
        value += f"; {changed} rows of your own ({own})" if own.is_file() else f"; your own rows would go into {own}"
    return Check("models", "ok", value)
