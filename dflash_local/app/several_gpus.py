"""What several GPUs of a machine are good for: layers spread over two of them, or a server over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_local.app.models import ModelStore, server_commands
from dflash_local.app.recommending import over_all
from dflash_local.load_config import LoadConfig
from dflash_local.tables import amount

if TYPE_CHECKING:
    from dflash_local.app.fitting import Shapes
    from dflash_local.app.resolve import Choice
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Option
    from dflash_local.settings import Settings

# docs/figures.md, random weights
COST = {
    "fused": "one GPU at a time: memory, not speed (1 % slower than one card that held it all, two H200)",
    "reference": "one GPU at a time, without the fused engine: 36 ms a step where that takes 4.5 (Qwen3.5-9B, H200)",
}


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """Describes a pair over all GPUs of a machine.

    Attributes:
        spread: the best weights by layers; None where no engine can take the options so. command: of a server that
            uses all GPUs at once; empty where none is known.
    """

    spread: Option | None
    command: str

    def as_dict(self) -> dict[str, Any]:
        spread = None if self.spread is None else {**self.spread.plan.as_dict(), "weights": self.spread.name}
        return {"spread": spread, "server_command": self.command}

    @property
    def line(self) -> str:
        parts = []
        if self.spread is not None:
            found = self.spread.plan
            fits = "" if found.fits else ", too much"
            takes = f"{amount(found.ledger.total)} of the {amount(found.machine.free)} there are{fits}"
            how = f"over {found.machine.name} --device balanced takes {takes} with {self.spread.name}"
            parts.append(f"{how}, and works on {COST[found.engine]}")
        server = "a server works on all of them at once"
        parts.append(f"{server}: {self.command}" if self.command else f"{server}; no command is known for this pair")
        return "; ".join(parts)


def several_gpus(
    choice: Choice, known: Shapes, where: Machine, user: Settings, config: LoadConfig, store: ModelStore | None
) -> SeveralGpus | None:
    """Tell what all GPUs of a machine are good for; None where there is one."""
    if where.count < 2:
        return None
    ways = over_all(choice, known, where, user, config, store=store)
    spread = None if ways is None else ways.best or ways.smallest
    commands = {} if choice.row is None else server_commands(choice.row, where.count)
    return SeveralGpus(spread, next(iter(commands.values()), ""))
