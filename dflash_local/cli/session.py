"""The one place of the command line that loads a pair: whether it fits, how far it is, who holds its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local import settings
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.attaching import attached
from dflash_local.cli.console import Console
from dflash_local.errors import DFlashError, MissingDependencyError, UsageError
from dflash_local.events import LoadProgress
from dflash_local.request import MAX_NEW_TOKENS, check_integer
from dflash_local.service.service import Service, Session

if TYPE_CHECKING:
    from dflash_local.cli.fit import Shapes
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.wish import Wish as PlannedWish


@dataclass(frozen=True, slots=True)
class LoadWish:
    """How the user wants a pair loaded; checked by the engine.

    Attributes:
        context: tokens the session may hold; None takes what fits, at most the models' own limit.
        fit_check: ask the planner first and refuse what does not fit.
        user: whose folders and locks; None when nothing is to be looked up there.
    """

    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    allow_mismatch: bool = False
    draft: bool = True
    context: int | None = None
    fit_check: bool = True
    user: settings.Settings | None = None
    engine: str = "auto"
    exact: bool = False
    draft_window: int | None = None
    draft_side: str = "auto"
    kv_cache: str = "auto"


def load_wish(
    user: settings.Settings,
    *,
    dtype: Enum | None,
    device: str | None,
    engine: Enum | None = None,
    quantize: Enum | None = None,
    allow_mismatch: bool = False,
    draft: bool = True,
    context: int | None = None,
    fit_check: bool = True,
    exact: bool | None = None,
    draft_window: int | None = None,
    draft_side: Enum | None = None,
    kv_cache: Enum | None = None,
) -> LoadWish:
    """The options of a command, then the user's settings, then ``auto``."""
    if draft_window is not None:
        check_integer("draft_window", draft_window, 1, MAX_NEW_TOKENS)
    return LoadWish(
        dtype=opt.first(opt.value_of(dtype), user.dtype, "auto"),
        device=opt.first(device, user.device, "auto"),
        engine=opt.first(opt.value_of(engine), user.engine, "auto"),
        quantize=opt.value_of(quantize),
        allow_mismatch=allow_mismatch,
        draft=draft,
        context=context,
        fit_check=fit_check,
        user=user,
        exact=user.exact if exact is None else exact,
        draft_window=user.draft_window if draft_window is None else draft_window,
        draft_side=opt.first(opt.value_of(draft_side), user.draft_side, "auto"),
        kv_cache=opt.first(opt.value_of(kv_cache), user.kv_cache, "auto"),
    )


@contextmanager
def named_when_missing(package: str = "dflash-local") -> Iterator[None]:
    """Around an import of ours that needs other libraries.

    Args:
        package: what brings them, as a shell takes it.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dflash_local"):
            raise
        raise MissingDependencyError(f"{error.name} is not installed", f"pip install {package}") from error


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
    with named_when_missing():
        from dflash_local.engine.load import LoadOptions, load
    options = LoadOptions(
        dtype=wish.dtype,
        device=wish.device,
        engine=wish.engine,
        quantize=wish.quantize,
        allow_mismatch=wish.allow_mismatch,
        draft=wish.draft,
        context=wish.context,
        exact=wish.exact,
        draft_window=wish.draft_window,
        draft_side=wish.draft_side,
        kv_cache=wish.kv_cache,
    )
    return load(pair, options, progress)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the planner says of a pair on this machine; ``limit`` is the context both models were made for."""

    known: Shapes
    where: Machine
    asked: PlannedWish
    found: Plan
    limit: int

    @property
    def context(self) -> int:
        """Tokens that the session would hold."""
        if self.asked.context is not None:
            return self.asked.context
        return min(self.found.context or self.limit, self.limit) if self.found.fits else self.limit


def _planned(pair: Pair, wish: LoadWish) -> _Planned | None:
    """None when a config.json cannot be read, which loading will tell better.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.cli import fit
    from dflash_local.planner import plan as planner
    from dflash_local.planner.machine import this_machine
    from dflash_local.planner.wish import Wish

    known = fit.folder_shapes(pair.name, pair.target, pair.drafter if wish.draft else None)
    if known is None:
        return None
    where = this_machine(wish.device, wish.user.environ if wish.user is not None else {})
    asked = Wish(
        wish.dtype,
        wish.quantize,
        wish.context,
        wish.draft,
        engine=wish.engine,
        exact=wish.exact,
        draft_side=wish.draft_side,
        kv_cache=wish.kv_cache,
    )
    found = planner.plan(known.target, known.drafter, where, asked)
    return _Planned(known, where, asked, found, planner.context_limit(known.target, known.drafter))


def planned_context(pair: Pair, wish: LoadWish) -> int | None:
    """Tokens that the session would hold if it were loaded now; None where only the load can tell."""
    try:
        planned = _planned(pair, wish)
    except DFlashError:  # the load says it
        return None
    if planned is None:
        return wish.context
    return planned.context if wish.fit_check else wish.context or planned.limit


def fitted(pair: Pair, wish: LoadWish, console: Console) -> LoadWish:
    """The wish with the context and the draft side that fit, where the user named none.

    Raises:
        DoesNotFitError: not even the shortest context fits, or not the one asked for; names what would.
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.cli import fit
    from dflash_local.planner.plan import nearest

    planned = _planned(pair, wish) if wish.fit_check else None
    if planned is None:
        return wish
    known, where, found = planned.known, planned.where, planned.found
    if fit.too_big(found):
        refusal = fit.refusal_of(found, nearest(known.target, known.drafter, where, planned.asked))
        refusal.hint = f"{refusal.hint}; --no-fit-check loads it all the same"
        raise refusal
    if wish.device == "auto" and where.device.startswith("cuda:") and where.device != "cuda:0":
        wish = replace(wish, device=where.device)  # the engine's own choice would be the first GPU
        console.note(f"on {where.device}, {where.name}: {where.why}", "dim")
    if found.fits and wish.draft_side == "auto" and found.draft_side != "auto":
        console.note(f"draft side {found.draft_side}: what fits on {where.name}; no reply changes by it", "dim")
        wish = replace(wish, draft_side=found.draft_side)
    if wish.context is None and planned.context < planned.limit:
        console.note(f"context {planned.context:,} of {planned.limit:,}: what fits on {where.name}", "dim")
        wish = replace(wish, context=planned.context)
    return wish


@contextmanager
def held(pair: Pair, user: settings.Settings | None) -> Iterator[None]:
    """Within, other programs know that the pair's repositories are loaded and do not remove them.

    Raises:
        BusyError: one of them is being removed.
    """
    repos = _repos(pair, user.hub.cache) if user is not None and user.hub.cache is not None else ()
    with ExitStack() as stack:
        if repos and user is not None:
            from dflash_local.store import lock

            for repo in repos:
                stack.enter_context(lock.using(lock.folder_of(user), repo))
        yield


def _repos(pair: Pair, cache: Path) -> tuple[str, ...]:
    """The repositories of the cache that the pair's folders are snapshots of."""
    from dflash_local.store.names import repo_of

    found = []
    for folder in (pair.target, pair.drafter):
        try:
            parts = folder.absolute().relative_to(cache.absolute()).parts if folder is not None else ()
        except ValueError:  # elsewhere on the disk
            continue
        repo = repo_of(parts[0]) if len(parts) > 1 else None
        found += [repo] if repo else []
    return tuple(dict.fromkeys(found))


def load_pair(pair: Pair, wish: LoadWish, console: Console) -> Session:
    """Load a pair, showing how far it is; notices of the load go to stderr.

    Raises:
        DoesNotFitError: it does not fit. DFlashError: see ``open_session``.
    """
    wish = fitted(pair, wish, console)
    with console.progress() as line:
        session = open_session(pair, wish, lambda event: line(f"loading {pair.name}: {event.stage}", event.fraction))
    for notice in session.facts.notices:
        console.warn(notice)
    return session


class HeldService(Service):
    """A service that lets go of the pair's files when it is closed."""

    def __init__(self, session: Session, hold: ExitStack) -> None:
        super().__init__(session)
        self._hold = hold

    def close(self) -> None:
        """Close the session, then let others remove its files."""
        super().close()
        self._hold.close()


def start_service(pair: Pair, wish: LoadWish, console: Console) -> Service:
    """A service over the loaded pair, to be used in a ``with``; over a running server's, where one has it."""
    elsewhere = attached(pair, wish, console)
    if elsewhere is not None:
        return Service(elsewhere)
    with ExitStack() as stack:
        stack.enter_context(held(pair, wish.user))
        session = load_pair(pair, wish, console)
        return HeldService(session, stack.pop_all())
