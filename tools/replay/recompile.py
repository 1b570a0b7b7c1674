"""Compiles a kernel for a card that is not here, by its name in a ``KernelRecord``: needs NVRTC, no GPU."""

from __future__ import annotations

import re
from typing import Any

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import expert_gemm, fragment_gemm, nvrtc

# Of names that come from elsewhere nothing but numbers of a kernel reaches the compiler.
OPTION = re.compile(r"--std=c\+\+\d\d|--fmad=false|-D[A-Z][A-Z0-9_]{0,40}=-?\d{1,9}")


def recompiled(kernel: str, capability: Any) -> str:
    """``compiles``, or why not: the compiler's first line, an unknown name or card, or what is missing here."""
    if not isinstance(capability, (list, tuple)) or len(capability) != 2 or any(type(x) is not int for x in capability):
        return "not tried: no card's capability"
    options = [word for word in kernel.split() if word.startswith("-")]
    if not options or not all(OPTION.fullmatch(word) for word in options):
        return "not tried: no name of a kernel"
    unmet = nvrtc.why_not((capability[0], capability[1]))
    if unmet is not None:
        return f"not tried: {unmet.message}"
    # A few-row kernel has no name.
    experts = next((word for word in kernel.split() if word in expert_gemm.SOURCES), None)
    source = fragment_gemm.source_text(fragment_gemm.SOURCE) if experts is None else expert_gemm.source_of(experts)
    target = f"--gpu-architecture=sm_{capability[0]}{capability[1]}"
    try:
        nvrtc.nvrtc().compile(source, [target, *options])
    except MissingDependencyError as error:
        return f"not tried: {error.message}"
    except RuntimeError as error:
        return f"does not compile: {str(error).strip().partition(chr(10))[0][:200]}"
    return "compiles"
