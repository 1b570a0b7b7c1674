"""What several GPUs of a machine are good for: layers spread over two of them, or a server over all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_local.app.models import ModelStore, download_gib, server_commands
from dflash_local.app.recommending import over_all
from dflash_local.load_config import LoadConfig
from dflash_local.tables import GIB, amount

if TYPE_CHECKING:
    from dflash_local.app.fitting import Shapes
    from dflash_local.app.resolve import Choice
    from dflash_local.config.features import Mixer
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.recommend import Option
    from dflash_local.settings import Settings

# docs/figures.md, random weights; of the fused engine where no speed is predicted
COST = {
    "fused": "1 % slower than one card that held it all, two H200",
    "reference": "without the fused engine: 36 ms a step where that takes 4.5, Qwen3.5-9B, H200",
}
UNLIKE = "each layer at the speed of its card, which is not predicted"  # in place of COST, which is of cards alike


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


class TensorParallelServer(NamedTuple):
    """Holds the command of a server that uses several GPUs at once, and how many; without one the reason."""

    gpus: int
    command: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """Describes a pair over all GPUs of a machine.

    Attributes:
        spread: the best weights by layers; None where no engine can take the options so. slower: by what two cards are
            predicted to be slower than the faster of them with all layers; None where no speed is predicted. count: of
            the GPUs.
    """

    spread: Option | None
    slower: Slower | None
    server: TensorParallelServer
    count: int

    def as_dict(self) -> dict[str, Any]:
        spread = None if self.spread is None else {**self.spread.plan.as_dict(), "weights": self.spread.name}
        slower = None if self.slower is None else self.slower._asdict()
        return {"spread": spread, "slower": slower, "server_command": self.server.command}

    @property
    def line(self) -> str:
        parts = []
        if self.spread is not None:
            found = self.spread.plan
            fits = "" if found.fits else ", too much"
            takes = f"{amount(found.ledger.total)} of the {amount(found.machine.free)} there are{fits}"
            how = f"over {found.machine.name} --device {found.machine.device} takes {takes} with {self.spread.name}"
            alike = len({card.name for card in found.machine.cards}) == 1
            cost = self.slower.words if self.slower else COST[found.engine] if alike else UNLIKE
            parts.append(f"{how}, and works on one GPU at a time: memory, not speed ({cost})")
        gpus, command, refusal = self.server
        works = f"a server works on {'all' if gpus == self.count else gpus} of them at once"
        parts.append(f"{works}: {command}" if command else f"{works}, but {refusal}")
        return "; ".join(parts)


def several_gpus(
    choice: Choice, known: Shapes, where: Machine, user: Settings, config: LoadConfig, store: ModelStore | None
) -> SeveralGpus | None:
    """Tell what all GPUs of a machine are good for; None where there is one."""
    if where.count < 2:
        return None
    ways = over_all(choice, known, where, user, config, store=store)
    spread = None if ways is None else ways.best or ways.smallest
    slower = None if spread is None else _slower(spread)
    return SeveralGpus(spread, slower, _server(choice, known, where), where.count)


def _server(choice: Choice, known: Shapes, where: Machine) -> TensorParallelServer:
    """Find the server over as many of the GPUs as can share the heads of every layer."""
    mixers = {layer.mixer for layer in known.target.layers}
    gpus = next(n for n in range(where.count, 0, -1) if all(_shared(mixer, n) for mixer in mixers))
    command = "" if choice.row is None else next(iter(server_commands(choice.row, gpus).values()), "")
    if choice.row is None or not command or gpus == 1:
        return TensorParallelServer(where.count, "", "no command is known for this pair")
    size, least = download_gib(choice.row), min(where.gpus[:gpus], key=lambda gpu: gpu.free)
    if size is not None and size * GIB > gpus * least.free:
        takes = f"the published weights take {amount(round(size * GIB / gpus))} of each"
        return TensorParallelServer(gpus, "", f"{takes}, and {amount(least.free)} is free")
    return TensorParallelServer(gpus, command)


def _shared(mixer: Mixer, gpus: int) -> bool:
    """Say whether vLLM and SGLang share a layer's heads among so many GPUs, which may hold copies of one key head."""
    from dflash_local.config.features import AttentionConfig, GatedDeltaNetConfig

    if isinstance(mixer, GatedDeltaNetConfig):
        return mixer.num_key_heads % gpus == 0
    keys = mixer.num_kv_heads if isinstance(mixer, AttentionConfig) else gpus
    return mixer.num_heads % gpus == 0 and 0 in (keys % gpus, gpus % keys)


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
