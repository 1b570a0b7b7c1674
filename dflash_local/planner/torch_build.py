"""Whether the installed torch can use the NVIDIA cards of this machine, and the command that mends it.

The load and ``doctor`` both say it in these words. Knows versions of drivers and of CUDA, no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_local.errors import DriverError
from dflash_local.planner import hardware
from dflash_local.planner.hardware import Driver, TorchFacts
from dflash_local.planner.software import release

# Lowest driver for the CUDA major version that torch was built for (NVIDIA's compatibility table).
OLDEST_DRIVERS = {13: (580,), 12: (525, 60)}
# The wheels of torch by the lowest driver for them, the newest first. Those of CUDA 12 run on every driver of CUDA 12
# (minor version compatibility); a driver of CUDA 12.8 gets that one, as its cards may be newer than CUDA 12.6.
WHEELS = (((580,), "cu130"), ((570,), "cu128"), ((525, 60), "cu126"))
INDEX = "https://download.pytorch.org/whl"
REINSTALL = f"pip install --force-reinstall torch --index-url {INDEX}"
# The wheels of CUDA 13 have no kernels for compute capability 5.0 to 7.0, whatever the driver.
FOR_OLD_CARDS = f"for an old card: {REINSTALL}/cu126; for a new one a newer torch; --device cpu runs without the card"


@dataclass(frozen=True, slots=True)
class Unusable:
    """Says why torch cannot use a card that the driver shows, and what to do about it."""

    why: str
    fix: str


def too_old(driver: str, cuda: int | None) -> str:
    """Say why a driver cannot run CUDA of a major version; empty when it can, or when that is unknown."""
    needed = OLDEST_DRIVERS.get(cuda) if cuda else None
    if not needed or not release(driver) or release(driver) >= needed:
        return ""
    return f"driver {driver} is too old for CUDA {cuda}, which needs {_dotted(needed)} or newer"


def install_command(driver: str) -> str:
    """Write what installs the torch for the newest CUDA that a driver runs; nothing when no torch runs on it."""
    wheel = next((name for lowest, name in WHEELS if release(driver) >= lowest), "")
    return f"{REINSTALL}/{wheel}" if wheel else ""


def is_hidden(driver: Driver, visible: str | None) -> bool:
    """Say whether ``CUDA_VISIBLE_DEVICES`` leaves no card: CUDA stops at the first name that it does not know."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return not (int(first) < len(driver.gpus) if first.isdigit() else first.startswith(("GPU-", "MIG-")))


def why_unusable(torch: TorchFacts, driver: Driver | None, visible: str | None) -> Unusable | None:
    """Say why torch sees none of the driver's cards; None when it sees one, when there is none, or when all are hidden.

    Args:
        driver: as nvidia-smi reports it. visible: ``CUDA_VISIBLE_DEVICES``.
    """
    if driver is None or torch.gpus or is_hidden(driver, visible):
        return None
    there, install = f"{', '.join(driver.gpus)} with driver {driver.version}", install_command(driver.version)
    update = f"update the NVIDIA driver to {_dotted(OLDEST_DRIVERS[max(OLDEST_DRIVERS)])} or newer"
    if torch.cuda is None:
        build = f"for ROCm {torch.hip}" if torch.hip else "without CUDA"
        return Unusable(
            f"{there}, but torch {torch.version} was built {build}", install or f"{update}; then reinstall torch"
        )
    old = too_old(driver.version, (release(torch.cuda) or (None,))[0])
    if old:
        return Unusable(f"{', '.join(driver.gpus)}: {old}", f"{update}, or {install}" if install else update)
    reason = f": {torch.error.splitlines()[0]}" if torch.error else ""
    fix = "start the machine again if its driver was updated; a container needs --gpus all"
    return Unusable(f"{there} cannot be used by torch for CUDA {torch.cuda}{reason}", fix)


def require_usable(device: str, environ: Mapping[str, str]) -> None:
    """Pass where a GPU is not requested, where there is no NVIDIA card, and where torch can use it.

    Args:
        device: as ``LoadConfig`` has it; ``auto`` takes a card that is there.
        environ: for ``CUDA_VISIBLE_DEVICES``; the caller owns the environment.

    Raises:
        DriverError: the driver shows a card and torch cannot use any.
    """
    if device in ("cpu", "mps"):
        return
    driver = hardware.nvidia_driver()
    torch = hardware.probe_torch() if driver is not None else None
    if torch is None or not torch.version:  # torch's absence is told where it is imported
        return
    found = why_unusable(torch, driver, environ.get("CUDA_VISIBLE_DEVICES"))
    if found is not None:
        raise DriverError(found.why, f"{found.fix}; --device cpu runs without the card")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
