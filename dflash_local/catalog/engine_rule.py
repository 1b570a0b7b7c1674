"""Which engine runs a pair. Knows no torch and no device.

The planner applies it before anything is loaded, the engine when it loads; so both choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_local.errors import UsageError
from dflash_local.load_config import FUSED, REFERENCE

OLDEST_CARD = (8, 0)  # compute capability: bfloat16 in the tensor cores


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine, and whether it runs a pair.

    Attributes:
        refusal: why it cannot, as the error that says so; None when it can.
        preferred: True where ``auto`` takes it before the candidates behind it; evaluated only if there is no refusal.
    """

    name: str
    refusal: UsageError | None
    preferred: Callable[[], bool]


def choose(wanted: str, candidates: Sequence[Candidate]) -> str:
    """The name of the requested engine; ``auto`` takes the first of those that can which is preferred here.

    Raises:
        UsageError: none that was requested can run this; says why the first of them cannot.
    """
    considered = [candidate for candidate in candidates if wanted in ("auto", candidate.name)]
    able = [candidate for candidate in considered if candidate.refusal is None]
    if not able and considered[0].refusal is not None:
        raise considered[0].refusal
    return next((candidate.name for candidate in able if candidate.preferred()), able[0].name)


def fused(why: str, has_kernels: Callable[[], bool], option: str = "") -> Candidate:
    """The fused engine, which is preferred where its kernels run.

    Args:
        why: what keeps it from this pair; empty when nothing does.
        option: one that only it has and that was given.
    """
    hint = f"run without {option}" if option else "use --engine reference"
    error = UsageError(f"the fused engine cannot run this: {why}", hint)
    return Candidate(FUSED, error if why else None, has_kernels)


def reference(option: str = "") -> Candidate:
    """The reference engine, which runs every pair, on any device, but not with an option of the fused one's."""
    error = UsageError(f"the reference engine does not know {option}", "leave it out, or take --engine fused")
    return Candidate(REFERENCE, error if option else None, lambda: True)


def refusal(*, bitsandbytes: str | None, dtype: str, device: str, target: str, experts: bool) -> str:
    """Why the fused engine cannot run a pair as it is to be loaded; empty when it can.

    Args:
        bitsandbytes: the format it is to have. dtype: float32, bfloat16 or float16.
        device: as a session names it. target: of ``config.fused_support.fused_refusal``. experts: the target has some.
    """
    if bitsandbytes is not None:
        return f"it does not know {bitsandbytes} weights"
    if dtype == "float16":
        return "it runs in bfloat16 or float32"
    if device.startswith(("mps", "balanced")):
        return f"it does not run on {device}"
    if experts and device.startswith("cuda") and dtype != "bfloat16":
        return f"its kernels for experts compute in bfloat16, not in {dtype}"
    return target
