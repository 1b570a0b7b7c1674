"""The one place of the command line that loads a pair, and shows how far loading is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dflash_local import settings
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.errors import MissingDependencyError, UsageError
from dflash_local.events import LoadProgress
from dflash_local.service.service import Service, Session


@dataclass(frozen=True, slots=True)
class LoadWish:
    """How the user wants a pair loaded; checked by the engine."""

    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    allow_mismatch: bool = False
    draft: bool = True


def load_wish(
    user: settings.Settings,
    *,
    dtype: Enum | None,
    device: str | None,
    quantize: Enum | None = None,
    allow_mismatch: bool = False,
    draft: bool = True,
) -> LoadWish:
    """The options of a command, then the user's settings, then ``auto``."""
    return LoadWish(
        dtype=opt.first(opt.value_of(dtype), user.dtype, "auto"),
        device=opt.first(device, user.device, "auto"),
        quantize=opt.value_of(quantize),
        allow_mismatch=allow_mismatch,
        draft=draft,
    )


def open_session(pair: Pair, wish: LoadWish, progress: Callable[[LoadProgress], None] | None = None) -> Session:
    """Load a pair; takes seconds to minutes.

    Raises:
        UsageError: drafting was wanted and no drafter is known.
        MissingDependencyError: torch or transformers is not installed.
        DFlashError: whatever is wrong with the files, the pair or the machine.
    """
    if wish.draft and pair.drafter is None:
        raise UsageError(
            f"no drafter is known for {pair.name}", "give its folder with --drafter, or run without one: --mode ar"
        )
    settings.quiet_libraries()
    try:
        from dflash_local.engine.load import LoadOptions, load
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dflash_local"):
            raise
        raise MissingDependencyError(f"{error.name} is not installed", "pip install dflash-local") from error
    options = LoadOptions(
        dtype=wish.dtype,
        device=wish.device,
        quantize=wish.quantize,
        allow_mismatch=wish.allow_mismatch,
        draft=wish.draft,
    )
    return load(pair, options, progress)


def load_pair(pair: Pair, wish: LoadWish, console: Console) -> Session:
    """Load a pair, showing how far it is; notices of the load go to stderr."""
    with console.progress() as line:
        session = open_session(pair, wish, lambda event: line(f"loading {pair.name}: {event.stage}", event.fraction))
    for notice in session.facts.notices:
        console.warn(notice)
    return session


def start_service(pair: Pair, wish: LoadWish, console: Console) -> Service:
    """A service over the loaded pair, to be used in a ``with``."""
    return Service(load_pair(pair, wish, console))
