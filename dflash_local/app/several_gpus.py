"""What several GPUs of a machine are good for: layers spread over two of them, or a server over all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_local.app.models import server_commands
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.tables import amount

if TYPE_CHECKING:
    from dflash_local.app.fitting import Shapes
    from dflash_local.catalog.row import Row
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan

# docs/figures.md, random weights
COST = {
    "fused": "one GPU at a time: memory, not speed (1 % slower than one card that held it all, two H200)",
    "reference": "one GPU at a time, without the fused engine: 36 ms a step where that takes 4.5 (Qwen3.5-9B, H200)",
}


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """Describes a pair over all GPUs of a machine.

    Attributes:
        spread: by layers; None where no engine can take the options so. command: of a server that uses all
            GPUs at once; empty where none is known.
    """

    spread: Plan | None
    command: str

    def as_dict(self) -> dict[str, Any]:
        return {"spread": None if self.spread is None else self.spread.as_dict(), "server_command": self.command}

    @property
    def line(self) -> str:
        parts = []
        if self.spread is not None:
            book, where = self.spread.ledger, self.spread.machine
            fits = "" if self.spread.fits else ", too much"
            takes = f"{amount(book.total)} of the {amount(where.free)} there are{fits}"
            parts.append(f"over {where.name} --device balanced takes {takes}, and works on {COST[self.spread.engine]}")
        server = "a server works on all of them at once"
        parts.append(f"{server}: {self.command}" if self.command else f"{server}; no command is known for this pair")
        return "; ".join(parts)


def several_gpus(row: Row | None, known: Shapes, where: Machine, config: LoadConfig) -> SeveralGpus | None:
    """Tell what all GPUs of a machine are good for; None where there is one."""
    from dflash_local.planner.plan import plan

    if where.count < 2:
        return None
    together = where.together()
    try:
        spread = plan(known.target, known.drafter, together, replace(config, device=together.device))
    except UsageError:  # a target and an option of which one is for the fused engine, and one is not
        spread = None
    commands = {} if row is None else server_commands(row, where.count)
    return SeveralGpus(spread, next(iter(commands.values()), ""))
