"""What a command takes that was given no MODEL: what settings name, the small real pair if it is here, or a toy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.models import model_store, registry
from dflash_local.app.resolve import Choice, choose, missing_files, size_gib
from dflash_local.store.settings_file import remember
from dflash_local.tables import gib

if TYPE_CHECKING:
    from dflash_local.settings import Settings

TOY, SMALL = "demo", "smollm2"


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """Names a MODEL that nobody typed.

    Attributes:
        own: the user's settings name it. hint: how to get a better one, in a line; empty where there is nothing to say.
    """

    name: str
    own: bool = False
    hint: str = ""


def default_model(user: Settings) -> DefaultModel:
    """Choose the model for a command that was given none.

    Raises:
        SettingsError: the registry cannot be read.
    """
    if user.model is not None:
        return DefaultModel(user.model, own=True)
    choice = small_pair(user)
    if choice is None:
        return DefaultModel(TOY)
    if is_here(choice, user):
        return DefaultModel(SMALL)
    if user.hub.offline:
        return DefaultModel(TOY)
    size = gib(size_gib(choice, choice.roles))
    return DefaultModel(TOY, hint=f"a toy; dflash pull {SMALL} gets a small real model ({size})")


def small_pair(user: Settings) -> Choice | None:
    """Choose the small real pair, whether or not its target is here; None where this installation has no drafter for
    it.

    Raises:
        SettingsError: the registry cannot be read.
    """
    choice = choose(SMALL, None, user) if registry(user).find(SMALL) is not None else None
    return None if choice is None or choice.drafter is None else choice


def is_here(choice: Choice, user: Settings) -> bool:
    """Say whether nothing of a pair has to be downloaded."""
    store = model_store(user)
    return store is not None and not missing_files(choice, store, draft=True)


def remember_default(name: str, user: Settings) -> None:
    """Write into the user's settings which model commands begin with. SettingsError: it cannot be written."""
    folder = Path(name).expanduser()
    named = str(folder.resolve()) if "/" in name and folder.is_dir() else name  # wherever dflash is started
    remember(user, model=named)
