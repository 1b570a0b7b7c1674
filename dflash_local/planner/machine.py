"""The machine a plan is made for: this one, or one named on the command line.

Chooses one device and says why, without torch. Knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from dflash_local.catalog.engine_rule import OLDEST_CARD
from dflash_local.errors import UsageError
from dflash_local.load_config import BALANCED, gpus_named, takes_several
from dflash_local.planner import accelerators, hardware, nvrtc_files
from dflash_local.planner.accelerators import Accelerator, RunProbe
from dflash_local.planner.cards import card_memory, find_card, lacks_kernels, names_together, typical_card

if TYPE_CHECKING:
    from dflash_local.planner.card_probe import CardProbe
    from dflash_local.planner.cpu_probe import CpuRates

GIB = 2**30
DISPLAY = GIB * 2 // 5  # what a driver and a desktop take of a card that is only named
RESERVE_SHARE, LEAST_RESERVE = 1 / 8, 2 * GIB  # of the main memory no plan uses: the system and other programs have it
ROUNDED = GIB // 4  # what is left is rounded down to this: kernels differ by some MiB in the memory that they tell
MPS_SHARE = 0.75  # of the main memory is what Metal recommends a program to use at most
NOMINAL_SHARE = 0.95  # of a nominal size is taken as free

Kind = Literal["cuda", "mps", "cpu", "named"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Describes one device. Memory in bytes; ``why`` it was chosen, or why a better one was not.

    ``free``: what a plan may use; of main memory that is all but a reserve, whatever other programs have taken now.
    ``device``: what to pass to the engine; auto for a card that is named alone. ``kernels``: False where the fused
    engine's are known not to run: an old card, or no Triton. ``compiler``: False where NVRTC, which compiles those of
    mixtures of experts, is known to be missing. ``others``: GPUs there are besides. ``cards``: the GPUs that layers
    are spread over, in the engine's order; empty for one device. ``free_now``: of main memory what is free at the
    moment; None for a GPU's own. ``rates``: what this CPU was measured to read, if it was.
    ``probe``: what this very GPU was measured to do, if it was. ``bfloat16``: this CPU computes in it itself.
    """

    name: str
    kind: Kind
    memory: int
    free: int
    why: str
    device: str = "auto"
    kernels: bool = True
    compiler: bool = True
    others: tuple[Machine, ...] = ()
    cards: tuple[Machine, ...] = ()
    free_now: int | None = None
    rates: CpuRates | None = None
    probe: CardProbe | None = None
    bfloat16: bool = False

    @property
    def room(self) -> str:
        return "free" if self.free_now is None else "usable"

    @property
    def count(self) -> int:
        """Count the GPUs there are, this one included."""
        return 1 + len(self.others)

    @property
    def gpus(self) -> tuple[Machine, ...]:
        """List the GPUs there are, each by itself, as torch counts them; named ones as they were named."""
        return tuple(sorted((replace(self, others=()), *self.others), key=lambda each: (len(each.device), each.device)))

    @property
    def free_of_cards(self) -> tuple[int, ...]:
        """Return the free bytes of each GPU that layers are spread over."""
        return tuple(each.free for each in self.cards)

    def together(self) -> Machine:
        """Take all of its GPUs as one device over which layers are spread."""
        return _spread(self.gpus, BALANCED, self.why)

    def roomiest_two(self) -> Machine | None:
        """Take the two GPUs with most free memory as ``together`` does; None where those are the first two."""
        gpus = self.gpus
        two = sorted(sorted(range(len(gpus)), key=lambda at: -gpus[at].free)[:2])
        if two in ([0], [0, 1]):
            return None
        return _spread([gpus[at] for at in two], f"cuda:{two[0]},{two[1]}", self.why)

    def two_of_them(self) -> Machine:
        """Take the first two of more GPUs that layers are spread over."""
        first, second = self.cards[:2]
        memory, free = first.memory + second.memory, first.free + second.free
        return replace(self, name=f"2 of {self.name}", memory=memory, free=free, cards=(first, second))

    def runs_kernels(self, dense: bool) -> bool:
        """Say whether the fused engine is the first choice for a dense target, or for a mixture of experts."""
        return self.kernels and self.kind in ("cuda", "named") and (dense or self.compiler)

    def as_dict(self) -> dict[str, Any]:
        names = ("name", "kind", "memory", "free", "why", "device", "count", "free_now")
        return {name: getattr(self, name) for name in names}


def this_machine(
    device: str = "auto",
    environ: Mapping[str, str] | None = None,
    probe: RunProbe = accelerators.run_probe,
    given_back: Mapping[str, int] | None = None,
) -> Machine:
    """Choose the device a run here would use: the GPU with most free memory, unless ``device`` says another.

    Args:
        device: as ``LoadConfig`` has it.
        environ: for ``CUDA_VISIBLE_DEVICES``; the caller owns the environment.
        given_back: bytes by device (cpu, mps, cuda:N) that count as free, too: a loaded pair makes room for the next.

    Raises:
        UsageError: ``device`` names a GPU that is not there.
    """
    back = given_back or {}
    if device == "cpu":
        return _with(_cpu("asked for"), back)
    if device == "mps":
        return _with(_mps("asked for"), back)
    hidden = (environ or {}).get("CUDA_VISIBLE_DEVICES")
    everything = accelerators.nvidia(probe)
    seen = accelerators.visible(everything, hidden)
    wanted = bool(gpus_named(device)) or device == BALANCED
    problem = accelerators.unusable(seen[0].driver) if seen else ""
    if seen and not problem:
        return _gpu(seen, device, back)
    if everything and not seen:
        problem = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    elif problem:
        problem = f"{seen[0].name}: {problem}"
    amd = () if everything else accelerators.amd(probe)
    if amd and accelerators.has_rocm():
        return _gpu(amd, device, back)
    if amd:
        problem = f"{amd[0].name}: the installed torch is built without ROCm"
    if wanted:
        raise UsageError(
            f"device {device!r} is not there: {problem or 'no GPU was found'}", "--device cpu works anywhere"
        )
    if accelerators.is_apple():
        return _with(_mps("Apple GPU"), back)
    return _with(_cpu(problem or "no GPU was found"), back)


def named(gpu: str | None, memory_gib: float | None, count: int = 1) -> Machine:
    """Describe a card by its name, by its memory, or both; ``count``: so many of it.

    Raises:
        UsageError: the name is not known and no memory is given, or the memory is not a sensible size.
    """
    if memory_gib is not None and not 0 < memory_gib <= 100_000:
        raise UsageError(f"--gpu-memory {memory_gib:g} is not a size in GiB", "give the card's memory, such as 24")
    why = "nominal memory, less 0.4 GiB for driver and display"
    if gpu is not None:
        name, memory_gib = card_memory(gpu) if memory_gib is None else (gpu, memory_gib)
    elif memory_gib is not None:
        why = f"it stands for cards of {memory_gib:g} GiB; {why}"
        name, memory_gib = typical_card(memory_gib)
    else:
        raise UsageError("a machine needs a name or its memory", "--gpu 'RTX 4090' or --gpu-memory 24")
    memory = round(memory_gib * GIB)
    one = Machine(name, "named", memory, max(0, memory - DISPLAY), why, kernels=not lacks_kernels(name))
    return replace(one, others=(count - 1) * (one,))


def several_named(gpus: Sequence[str]) -> Machine:
    """Describe a machine with GPUs of these names, as ``this_machine`` would. UsageError: see ``named``."""
    return _roomiest([replace(named(gpu, None), device=f"cuda:{at}") for at, gpu in enumerate(gpus)])


def _roomiest(machines: Sequence[Machine]) -> Machine:
    """Choose the GPU with most free memory, the first of several."""
    best = max(machines, key=lambda machine: machine.free)
    why = "; ".join(filter(None, (f"most free memory of {len(machines)} GPUs", best.why)))
    return replace(best, why=why, others=tuple(each for each in machines if each is not best))


def _with(machine: Machine, back: Mapping[str, int]) -> Machine:
    """Count what would be given back as free."""
    if machine.free_now is not None:
        return replace(machine, free_now=min(machine.memory, machine.free_now + back.get(machine.device, 0)))
    return replace(machine, free=min(machine.memory, machine.free + back.get(machine.device, 0)))


def _gpu(seen: tuple[Accelerator, ...], device: str, back: Mapping[str, int]) -> Machine:
    named = range(len(seen)) if device == BALANCED else gpus_named(device)
    missing = next((index for index in named if index >= len(seen)), None)
    if missing is not None:
        raise UsageError(f"device 'cuda:{missing}' is not there", f"{len(seen)} GPU visible, counted from cuda:0")
    if takes_several(device):
        why = f"layers spread over {'all of them' if device == BALANCED else 'those that were asked for'}"
        return _spread([_with(_described(seen[index], index, ""), back) for index in named], device, why)
    if named and device != "cuda":
        return _with(_described(seen[named[0]], named[0], "asked for"), back)
    if device == "cuda" or len(seen) == 1:
        return _with(_described(seen[0], 0, "the only GPU" if len(seen) == 1 else "the first GPU"), back)
    return _roomiest([_with(_described(gpu, index, ""), back) for index, gpu in enumerate(seen)])


def _spread(cards: Sequence[Machine], device: str, why: str) -> Machine:
    """Take GPUs as one device over which layers are spread, in this order."""
    return replace(
        cards[0],
        name=names_together([each.name for each in cards]),
        memory=sum(each.memory for each in cards),
        free=sum(each.free for each in cards),
        why=why,
        device=device,
        kernels=all(each.kernels for each in cards),
        cards=tuple(cards),
        probe=None,
    )


def _described(gpu: Accelerator, index: int, why: str) -> Machine:
    """Describe a device, sizes that the driver does not report filled in, and labelled so."""
    memory, free, note = gpu.memory, gpu.free, ""
    if memory is None and (nominal := find_card(gpu.name)) is not None:
        memory, note = round(nominal * GIB), "the driver tells no memory: nominal"
        free = round(memory * NOMINAL_SHARE)
    elif memory is None:
        main = hardware.memory()
        memory, free = main.total, main.available
        note = "the driver tells no memory of its own: taken as shared with the main memory"
    elif free is None:
        free, note = round(memory * NOMINAL_SHARE), "nominal memory"
    why, device = "; ".join(filter(None, (why, note))), f"cuda:{index}"
    compiler = nvrtc_files.is_there(accelerators.cuda_major())
    return Machine(gpu.name, "cuda", memory, free, why, device, _has_kernels(gpu), compiler)


def _has_kernels(gpu: Accelerator) -> bool:
    """Say whether Triton is here and the card new enough; a driver that does not tell leaves its name to go by.

    Nobody has tried the kernels on an AMD card yet.
    """
    if find_spec("triton") is None or gpu.is_amd:
        return False
    return not lacks_kernels(gpu.name) if gpu.capability is None else gpu.capability >= OLDEST_CARD


def _cpu(why: str) -> Machine:
    main = hardware.memory()
    limit = "; main memory as the container limits it" if main.limited else ""
    native = hardware.computes_bfloat16()
    return Machine(
        "CPU", "cpu", main.total, usable(main.total), why + limit, "cpu", free_now=main.available, bfloat16=native
    )


def _mps(why: str) -> Machine:
    main = hardware.memory()
    share = round(MPS_SHARE * main.total)
    free = min(share, usable(main.total))
    return Machine("Apple GPU", "mps", share, free, f"{why}; 75 % of the main memory", "mps", free_now=main.available)


def usable(total: int) -> int:
    """Return what plans may use of so much main memory; at least half of it, however small the machine is."""
    reserve = max(round(RESERVE_SHARE * total), min(LEAST_RESERVE, total // 2))
    return (total - reserve) // ROUNDED * ROUNDED
