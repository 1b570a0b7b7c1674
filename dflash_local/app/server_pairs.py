"""What is known here of a pair that a vLLM or SGLang server has, and what such a server must serve for it.

Files of the pair are not needed on this machine: tokenizer and chat template are the server's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.models import model_store, registry
from dflash_local.app.resolve import Choice, choose
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import UnknownModelError
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.remote.server_checks import WantedModel


def known_pair(model: str, drafter: str | None, user: Settings) -> Pair:
    """Return what is known here of a pair that a server has, whatever of it is on this machine."""
    choice = _choice(model, drafter, user)
    if choice is None or choice.row is None:
        return Pair(model, _folder(choice, user), _nowhere(user), bundled=False)
    if choice.row.bundled and choice.own_drafter:
        return bundled.find(choice.row.bundled)
    row = choice.row
    return Pair(
        choice.name,
        _folder(choice, user),
        _nowhere(user),
        bundled=False,
        acceptance_band=row.alarm_band,
        thinking=row.thinking,
        sampling=row.advised_sampling,
    )


def wanted_model(pair: Pair, drafter: str | None, user: Settings) -> WantedModel:
    """Return what a server must serve for a pair."""
    from dflash_local.remote.server_checks import WantedModel

    choice = _choice(pair.name, drafter, user)
    if choice is None:
        return WantedModel(pair.name, (pair.name,))
    row = choice.row
    names = [pair.name, choice.name, str(choice.target.resolve()) if isinstance(choice.target, Path) else ""]
    if row is not None and row.name == choice.name:
        names += [row.target.id if row.target is not None else "", *row.aliases]
    drafter_of = choice.drafter
    drafters = [str(drafter_of.resolve()) if isinstance(drafter_of, Path) else drafter_of.id if drafter_of else ""]
    known = choice.drafter_row
    drafters += known.mirrors if known is not None else ()
    drafters += [str(folder) for name in drafters if (folder := _snapshot(name, user)) is not None]
    block = known.fingerprints[0].block_size if known is not None and known.fingerprints else None
    return WantedModel(
        pair.name, tuple(filter(None, dict.fromkeys(names))), tuple(filter(None, dict.fromkeys(drafters))), block
    )


def _snapshot(name: str, user: Settings) -> Path | None:
    """The folder of a repository of which something is on this machine; a server launched here is given that."""
    from dflash_local.catalog.repo_id import is_repo_id
    from dflash_local.catalog.row import Repo

    store = model_store(user)
    found = store.find(Repo(name)) if store is not None and is_repo_id(name) else None
    return None if found is None else found.folder.resolve()


def sampling_notice(pair: Pair, given: str = "--temperature is given") -> str:
    """That replies are greedy where nobody gives a temperature; empty where the authors' advice is on this machine."""
    if pair.sampling is not None or open_source(pair.target).generation_config():
        return ""
    return f"greedy unless {given}: what the authors of {pair.name} advise is not on this machine"


def _choice(model: str, drafter: str | None, user: Settings) -> Choice | None:
    """What a name means; None for one that only the server may know."""
    try:
        return choose(model, drafter, user, draft=False)
    except UnknownModelError:
        if registry(user).find(model) is not None or drafter is not None:
            raise
        return None


def _folder(choice: Choice | None, user: Settings) -> Path:
    """The target's folder where it is on this machine."""
    target = choice.target if choice is not None else None
    if isinstance(target, Path):
        return target
    store = model_store(user)
    found = store.find(target) if store is not None else None
    return _nowhere(user) if found is None else found.folder


def _nowhere(user: Settings) -> Path:
    """A path that does not exist, of what lies on a server."""
    return (user.hub.cache or Path(os.devnull)) / "on a server"
