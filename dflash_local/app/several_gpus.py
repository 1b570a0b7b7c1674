"""What several GPUs of a machine are good for: layers spread over two of them, or a server over all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

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

# docs/figures.md, random weights; of the fused engine where no speed is predicted
COST = {
    "fused": "1 % slower than one card that held it all, two H200",
    "reference": "without the fused engine: 36 ms a step where that takes 4.5, Qwen3.5-9B, H200",
}


class Slower(NamedTuple):
    """Compares two cards with ``card``, the faster of them, if that held it all.

    Attributes:
        share: of its tokens/s that are lost. basis: how the way between the two, or the whole, is known.
    """

    card: str
    share: float
    basis: str

    @property
    def words(self) -> str:
        return f"{100 * self.share:.2g} % slower than one {self.card} that held it all, predicted: {self.basis}"


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """Describes a pair over all GPUs of a machine.

    Attributes:
        spread: the best weights by layers; None where no engine can take the options so. slower: by what two cards are
            predicted to be slower than the faster of them with all layers; None where no speed is predicted. command:
            of a server that uses all GPUs at once; empty where none is known.
    """

    spread: Option | None
    slower: Slower | None
    command: str

    def as_dict(self) -> dict[str, Any]:
        spread = None if self.spread is None else {**self.spread.plan.as_dict(), "weights": self.spread.name}
        slower = None if self.slower is None else self.slower._asdict()
        return {"spread": spread, "slower": slower, "server_command": self.command}

    @property
    def line(self) -> str:
        parts = []
        if self.spread is not None:
            found = self.spread.plan
            fits = "" if found.fits else ", too much"
            takes = f"{amount(found.ledger.total)} of the {amount(found.machine.free)} there are{fits}"
            how = f"over {found.machine.name} --device balanced takes {takes} with {self.spread.name}"
            cost = COST[found.engine] if self.slower is None else self.slower.words
            parts.append(f"{how}, and works on one GPU at a time: memory, not speed ({cost})")
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
    return SeveralGpus(spread, None if spread is None else _slower(spread), next(iter(commands.values()), ""))


def _slower(spread: Option) -> Slower | None:
    from dflash_local.planner.card_probe import crossing_us
    from dflash_local.planner.speed import predict

    lengths = None if spread.prediction is None else spread.prediction.acceptance

    def tokens_per_s(machine: Machine) -> float | None:
        found = predict(replace(spread.plan, machine=machine), spread.weights.target, spread.drafter, lengths)
        return None if found is None else found.least_tokens_per_s

    both = tokens_per_s(spread.plan.machine)
    if both is None:
        return None
    first, second = spread.plan.machine.cards
    card, alone = max(((each.name, tokens_per_s(each) or both) for each in (first, second)), key=lambda one: one[1])
    return Slower(card, 1 - both / alone, crossing_us(first.name, second.name, first.probe)[1])
