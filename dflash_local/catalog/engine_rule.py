"""Which engine runs a pair. Knows no torch and no device.

The planner asks it before anything is loaded, the engine when it loads; so both give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_local.errors import UsageError

OLDEST_CARD = (8, 0)  # compute capability: bfloat16 in the tensor cores


def choose(wanted: str, why: str, has_kernels: Callable[[], bool], option: str = "") -> str:
    """``fused`` or ``reference``: ``auto`` takes the fused one where its kernels run.

    Args:
        why: what keeps the fused engine from this pair; empty when nothing does.
        option: one that only the fused engine has and that was given; it is taken on any device then.

    Raises:
        UsageError: an engine was asked for that cannot run this; says why.
    """
    if wanted == "reference":
        if option:
            raise UsageError(f"the reference engine does not know {option}", "leave it out, or take --engine fused")
        return wanted
    if wanted == "fused" or option:
        if why:
            hint = f"run without {option}" if option else "use --engine reference"
            raise UsageError(f"the fused engine cannot run this: {why}", hint)
        return "fused"
    return "fused" if not why and has_kernels() else "reference"


def refusal(*, quantize: str | None, dtype: str, device: str, drafter_biased: bool, target: str) -> str:
    """Why the fused engine cannot run a pair as it is to be loaded; empty when it can.

    Args:
        dtype: float32, bfloat16 or float16. device: as a session names it.
        target: of ``config.fused_support.fused_refusal``.
    """
    if quantize is not None:
        return f"it does not know {quantize} weights"
    if dtype == "float16":
        return "it runs in bfloat16 or float32"
    if device.startswith(("mps", "balanced")):
        return f"it does not run on {device}"
    if drafter_biased:
        return "the drafter's projections have biases"
    return target
