"""Which engine a plan takes, and whether llama.cpp is worth trying in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_local.app.resolve import Choice
from dflash_local.load_config import FUSED

if TYPE_CHECKING:
    from dflash_local.planner.plan import Plan

DEVICES = {"cpu": "the only one on a CPU", "mps": "the only one on an Apple GPU"}
ASKED = "as asked for: its kernels are for GPUs"
NO_KERNELS = "as the other one's kernels are not for this card"
REFUSED = "as the other one refuses this load"


class PlannedEngine(NamedTuple):
    """An engine, why it is that one, and the command that has llama.cpp instead; empty where it would not help."""

    engine: str
    why: str
    llama_cpp: str = ""

    @property
    def line(self) -> str:
        """Say it in one line."""
        other = f"; llama.cpp may be faster: {self.llama_cpp}" if self.llama_cpp else ""
        return f"engine: {self.engine}, {self.why}{other}"


def planned_engine(choice: Choice, plan: Plan) -> PlannedEngine:
    """Choose as a load would.

    llama.cpp is proposed where the reference engine would run it, which reads 16 bits of a weight or more; not for the
    pairs of the first run, which were measured to be faster here.
    """
    machine = plan.machine
    if plan.engine == FUSED:
        return PlannedEngine(FUSED, ASKED if machine.kind in DEVICES else "whose kernels are for this card and format")
    why = plan.slow or DEVICES.get(machine.kind) or (REFUSED if machine.kernels else NO_KERNELS)
    row = choice.row
    if row is not None and (row.bundled or row.bundled_drafter):
        return PlannedEngine(plan.engine, why)
    files = [choice.name] if choice.name.endswith(".gguf") else []
    files += [variant.model for variant in (row.variants if row is not None else ()) if variant.file is not None]
    return PlannedEngine(plan.engine, why, f"dflash chat {(files or ['FILE.gguf'])[0]} --engine llama.cpp")
