"""Load configurations near the requested one, ever smaller: what to try where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dflash_local.load_config import BITSANDBYTES, LOAD_OPTIONS, QUANTIZED, LoadConfig
from dflash_local.planner.machine import Machine

FORMATS = (None, *LOAD_OPTIONS["quantize"].choices)
SMALLER = ("int8", "int4", *BITSANDBYTES)  # fp8 takes what int8 takes, and rounds coarser
COARSER = ("8bit", "8bit-drafter")  # drafter precisions that auto takes for want of memory: ever less, all ids drafted


def formats_of(config: LoadConfig) -> tuple[str | None, ...]:
    """The weight formats that the configuration's engine can have at all."""
    return (None, *QUANTIZED) if config.needs_fused or config.engine == "fused" else FORMATS


def alternatives(config: LoadConfig, machine: Machine) -> Iterator[LoadConfig]:
    """Configurations ever further from this one."""
    smaller = [each for each in SMALLER if each in formats_of(config)]
    if config.quantize:
        smaller = smaller[smaller.index("int4") :]
    tried = dict.fromkeys((config.quantize, *smaller))
    for draft in dict.fromkeys((config.draft, False)):
        for quantize in tried:
            other = replace(config, quantize=quantize, draft=draft, context=None)
            yield other
            if draft and config.drafter_precision != "auto":
                yield replace(other, drafter_precision="auto")
        if machine.kind == "cpu" and config.dtype in ("auto", "float32"):
            yield replace(config, dtype="bfloat16", draft=draft, context=None)
