"""Which engine runs a pair: one rule for the planner, before anything is loaded, and for the engine. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_local.errors import UsageError
from dflash_local.load_config import FUSED, REFERENCE

OLDEST_CARD = (8, 0)  # compute capability: bfloat16 in the tensor cores


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine; ``refusal``: why it cannot run a pair, if so; ``auto`` takes it where it is ``preferred``."""

    name: str
    refusal: UsageError | None
    preferred: Callable[[], bool]


def choose(wanted: str, candidates: Sequence[Candidate]) -> str:
    """Return the requested engine's name, for ``auto`` the first preferred one that can. UsageError: why none can."""
    considered = [candidate for candidate in candidates if wanted in ("auto", candidate.name)]
    able = [candidate for candidate in considered if candidate.refusal is None]
    if not able and considered[0].refusal is not None:
        raise considered[0].refusal
    return next((candidate.name for candidate in able if candidate.preferred()), able[0].name)


def fused(why: str, has_kernels: Callable[[], bool], option: str = "") -> Candidate:
    """Return the fused engine, preferred where its kernels run. ``why``, ``option``: what keeps it from this pair."""
    hint = f"run without {option}" if option else "use --engine reference"
    error = UsageError(f"the fused engine cannot run this: {why}", hint)
    return Candidate(FUSED, error if why else None, has_kernels)


def reference(option: str = "") -> Candidate:
    """Return the reference engine, which runs every pair, on any device, but not with an option of the fused one's."""
    error = UsageError(f"the reference engine does not know {option}", "leave it out, or take --engine fused")
    return Candidate(REFERENCE, error if option else None, lambda: True)


def refusal(*, bitsandbytes: str | None, dtype: str, device: str, target: str, experts: bool, drafter: str) -> str:
    """Return why the fused engine cannot run a pair as it is to be loaded; empty when it can.

    Args:
        bitsandbytes: the format it is to have. dtype: float32, bfloat16 or float16.
        device: as torch names it, or its kind. target: of ``config.fused_support.fused_refusal``.
        experts: the target has some. drafter: of ``Drafter.fused_refusal``.
    """
    if bitsandbytes is not None:
        return f"it does not know {bitsandbytes} weights"
    if dtype == "float16":
        return "it runs in bfloat16 or float32"
    if device.startswith("mps"):
        return f"it does not run on {device}"
    if experts and device.startswith("cuda") and dtype != "bfloat16":
        return f"its kernels for experts compute in bfloat16, not in {dtype}"
    return target or drafter
