"""What a load dialog offers: each way to load a pair on this machine, with its memory, speed and download."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from dflash_local.app.fitting import Loaded, machine, shapes
from dflash_local.app.models import model_store
from dflash_local.app.recommending import download_of, recommended
from dflash_local.app.resolve import choose, refuse_what_does_not_run
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.recommend import Option, Preference

CONTEXTS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144)  # lengths that a dialog offers beside the most that fits


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """Describes one way to load a pair.

    Attributes:
        model: what commands take as MODEL: the pair's name, or a pre-quantised target's repository.
        option: its weights, its plan and its predicted speed.
        download_gib: to be fetched first; 0 where all of it is here, None where its size is not known. computed: it
            is counted from shapes.
    """

    model: str
    option: Option
    download_gib: float | None
    computed: bool = False

    @property
    def config(self) -> LoadConfig:
        return self.option.config

    @property
    def plan(self) -> Plan:
        return self.option.plan

    @property
    def fits(self) -> bool:
        return self.option.fits

    @property
    def here(self) -> bool:
        """Say whether nothing has to be downloaded."""
        return self.download_gib == 0


@dataclass(frozen=True, slots=True)
class LoadChoices:
    """Lists the ways to load a pair: those that fit, the best first, then those that do not.

    Attributes:
        name: of the pair. asked: what holds for all of them. contexts: lengths to choose from, the longest last.
        has_drafter: drafting can be switched off. nearest: what fits with less than was asked for, where none does.
    """

    name: str
    machine: Machine
    asked: LoadConfig
    choices: tuple[LoadChoice, ...]
    contexts: tuple[int, ...]
    has_drafter: bool
    nearest: Plan | None = None

    @property
    def settled(self) -> bool:
        """Say whether nothing is left to choose: there is one way, which fits and is here."""
        return len(self.choices) == 1 and self.choices[0].fits and self.choices[0].here

    @property
    def leading(self) -> LoadChoice:
        """Return the best; where nothing fits what lacks the least memory."""
        return min(self.choices, key=lambda each: (not each.fits, 0 if each.fits else each.plan.lacking or inf))

    @property
    def preselected(self) -> int | None:
        """Return the index of the best that is here, else of the best; None where nothing fits."""
        fitting = [index for index, each in enumerate(self.choices) if each.fits]
        return next((index for index in fitting if self.choices[index].here), fitting[0] if fitting else None)


def load_choices(
    name: str,
    user: Settings,
    asked: LoadConfig | None = None,
    loaded: Loaded | None = None,
    preference: Preference = "balanced",
) -> LoadChoices | None:
    """Plan every way to load a pair; may take a second. None where its shape is not known before it is here.

    Args:
        name: whatever ``resolve`` takes. asked: options that hold for all: context, drafter, device.
        loaded: what this process has loaded: its memory counts as free.

    Raises:
        UnknownModelError: no such pair. DoesNotFitError: it runs on a server only. DownloadError: it is announced only.
        UsageError: the device is not there.
    """
    from dflash_local.planner.plan import context_limit, nearest

    asked = asked or LoadConfig()
    try:
        choice = choose(name, None, user)
    except UsageError:
        if asked.draft:
            raise
        choice = choose(name, None, user, draft=False)  # a target that no drafter is known for
    refuse_what_does_not_run(choice)
    store = model_store(user)
    known = shapes(choice, store)
    if known is None:
        return None
    where = machine(user, device=asked.device, loaded=loaded)
    found = recommended(choice, known, where, user, asked, preference=preference, store=store)
    choices = []
    for option in (*found.fitting, *found.rest):
        model = choice.name if option.weights.variant is None else option.weights.variant.model
        choices.append(LoadChoice(model, option, *download_of(choice, option, store, here=True)))
    longest = max((option.plan.context or 0 for option in found.fitting), default=0)
    if asked.context is not None:
        longest = context_limit(known.target, known.drafter if asked.draft else None)
    contexts = tuple(context for context in CONTEXTS if context < longest)
    near = None if found.fitting else nearest(known.target, known.drafter, where, asked)
    return LoadChoices(choice.name, where, asked, tuple(choices), contexts, choice.drafter is not None, near)
