"""The one place of the command line that loads a pair: whether it fits, how far it is, who holds its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dflash_local import settings
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.attaching import attached
from dflash_local.cli.console import Console
from dflash_local.cli.tables import amount
from dflash_local.errors import DFlashError, KernelError, MissingDependencyError, UsageError
from dflash_local.events import LoadProgress
from dflash_local.load_config import LoadConfig
from dflash_local.service.service import Service, Session
from dflash_local.store.kept import take_unkept

if TYPE_CHECKING:
    from dflash_local.cli.fit import Shapes
    from dflash_local.engine.session import Session as EngineSession
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.service.load_steps import LoadSteps

CHECKED_DEVICE = "cuda"  # what a pair is checked on unasked: on a CPU it would take minutes


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


def open_session(pair: Pair, load: LoadConfig, progress: Callable[[LoadProgress], None] | None = None) -> Session:
    """Load a pair; takes seconds to minutes.

    Raises:
        UsageError: drafting was wanted and no drafter is known.
        MissingDependencyError: torch or transformers is not installed.
        DFlashError: whatever is wrong with the files, the pair or the machine.
    """
    if load.draft and pair.drafter is None:
        raise UsageError(
            f"no drafter is known for {pair.name}", "give its folder with --drafter, or run without one: --mode ar"
        )
    settings.quiet_libraries()
    with named_when_missing():
        from dflash_local import engine
    return engine.load(pair, load, progress)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What the planner says of a pair on this machine; ``limit`` is the context both models were made for."""

    known: Shapes
    where: Machine
    found: Plan
    limit: int


def _planned(pair: Pair, load: LoadConfig, user: settings.Settings) -> _Planned | None:
    """None when a config.json cannot be read, which loading will tell better.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.cli import fit
    from dflash_local.planner import plan as planner
    from dflash_local.planner.machine import this_machine

    known = fit.folder_shapes(pair.name, pair.target, pair.drafter if load.draft else None)
    if known is None:
        return None
    where = this_machine(load.device, user.environ)
    found = planner.plan(known.target, known.drafter, where, load)
    return _Planned(known, where, found, planner.context_limit(known.target, known.drafter))


def planned_context(pair: Pair, load: LoadConfig, user: settings.Settings) -> int | None:
    """Tokens that the session would hold if it were loaded now; None where only the load can tell."""
    try:
        planned = _planned(pair, load, user)
    except DFlashError:  # the load says it
        return None
    if load.context is not None or planned is None:
        return load.context
    return planned.found.context if load.fit_check and planned.found.fits else planned.limit


def planned_peak(pair: Pair, load: LoadConfig, user: settings.Settings) -> int | None:
    """Bytes that the plan of a load says torch's allocator holds at most; None where nothing is planned.

    Raises:
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    planned = _planned(pair, load, user)
    return None if planned is None else planned.found.ledger.peak


def fitted(pair: Pair, load: LoadConfig, user: settings.Settings, console: Console) -> LoadConfig:
    """What the plan loads: the context and the drafter precision that fit, where the user named none.

    Raises:
        DriverError: there is an NVIDIA card, and the installed torch cannot use it.
        DoesNotFitError: not even the shortest context fits, or not the one asked for; names what would.
        UsageError: the device is not there, or the context is longer than the models were made for.
    """
    from dflash_local.cli import fit
    from dflash_local.planner.plan import nearest
    from dflash_local.planner.torch_build import require_usable

    require_usable(load.device, user.environ)
    planned = _planned(pair, load, user) if load.fit_check else None
    if planned is None:
        return load
    known, where, found = planned.known, planned.where, planned.found
    if fit.too_big(found):
        refusal = fit.refusal_of(
            found, nearest(known.target, known.drafter, where, load), _variant_hint(pair, known, where, load, user)
        )
        refusal.hint = f"{refusal.hint}; --no-fit-check loads it all the same"
        raise refusal
    plan = replace(found.load, draft=load.draft) if found.fits else load
    if load.device == "auto" and where.device.startswith("cuda:") and where.device != "cuda:0":
        plan = replace(plan, device=where.device)  # the engine's own choice would be the first GPU
        console.note(f"on {where.device}, {where.name}: {where.why}", "dim")
    if plan.drafter_precision != load.drafter_precision:
        console.note(
            f"drafter precision {plan.drafter_precision}: what fits on {where.name}; no reply changes by it", "dim"
        )
    if plan.offload != load.offload:
        said = " and ".join(f"{line.name} ({amount(line.bytes)})" for line in found.ledger.host)
        console.note(f"in host memory: {said}: what fits on {where.name}; the same bits", "dim")
    if load.context is None and plan.context is not None and plan.context < planned.limit:
        console.note(f"context {plan.context:,} of {planned.limit:,}: what fits on {where.name}", "dim")
    return plan


def _variant_hint(pair: Pair, known: Shapes, where: Machine, load: LoadConfig, user: settings.Settings) -> str:
    """How to take a pre-quantised target that fits instead; empty where none is known to."""
    from dflash_local.cli import fit
    from dflash_local.cli.places import registry

    row = registry(user).find(pair.name)
    if row is None or row.target is None or row.name != pair.name:
        return ""
    better = fit.fitting_variant(fit.variant_plans(row, known, where, load))
    return "" if better is None else fit.variant_hint(pair.name, better)


@contextmanager
def held(pair: Pair, user: settings.Settings) -> Iterator[None]:
    """Within, other programs know that the pair's repositories are loaded and do not remove them.

    Raises:
        BusyError: one of them is being removed.
    """
    repos = _repos(pair, user.hub.cache) if user.hub.cache is not None else ()
    with ExitStack() as stack:
        if repos:
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


def load_pair(pair: Pair, load: LoadConfig, user: settings.Settings, console: Console) -> Session:
    """Load a pair, showing how far it is.

    Raises:
        DoesNotFitError: it does not fit. DFlashError: see ``open_session``.
    """
    load = fitted(pair, load, user, console)
    with _shown(pair, console, None) as told:
        return open_session(pair, load, told)


def warn_of(session: Session, console: Console) -> None:
    """Tell the notices of a load on stderr, and what it found out and could not keep."""
    for notice in (*session.facts.notices, take_unkept()):
        if notice:
            console.warn(notice)


def checked(
    session: Session, pair: Pair, load: LoadConfig, user: settings.Settings, say: Callable[[str, float], None]
) -> None:
    """Check a pair at its first load on a card; whatever is found against it is told at every load.

    Args:
        load: as it was asked for. say: told what is being checked and how far it is (0..1).

    Raises:
        DFlashError: see ``check.run.check``.
    """
    if load.skip_check or not session.facts.device.startswith(CHECKED_DEVICE):
        return
    from dflash_local.check.run import checked_once

    engine = cast("EngineSession", session)
    with ExitStack() as stack:
        stack.callback(session.close)  # where it is interrupted
        planned = planned_peak(pair, session.facts.load, user)
        report = checked_once(engine, pair, load, user.cache_dir, planned, say)
        stack.pop_all()
    checks = tuple(finding.verdict for finding in report.findings)
    engine.facts = replace(engine.facts, notices=(*engine.facts.notices, *report.notices), checks=checks)


def open_stepwise(
    pair: Pair,
    load: LoadConfig,
    user: settings.Settings,
    console: Console,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Session:
    """Load a pair for replies: a step slower where an earlier load of it on the card ended the program.

    Without its drafter it answers every request all the same. The line that says so goes to stderr.

    Args:
        progress: told how far it is, instead of the console.

    Raises:
        DFlashError: see ``fitted`` and ``open_session``.
    """
    from dflash_local.service import load_steps
    from dflash_local.service.plain import PlainSession

    asked = load
    steps = load_steps_of(load, user)
    if user.safe:
        load, line = load_steps.lowered(load, load_steps.PLAIN), f"DFLASH_SAFE: {load_steps.WORDS[load_steps.PLAIN]}"
    else:
        load, line = steps.begin_with(pair.name, load)
    if line:
        console.warn(line)
    session = _opened(pair, load, user, console, steps, progress)
    if not user.safe:
        with _shown(pair, console, progress) as told:
            checked(session, pair, load, user, lambda text, part: told(LoadProgress(text, part)))
    warn_of(session, console)
    return PlainSession(session) if asked.draft and not load.draft else session


def _opened(
    pair: Pair,
    load: LoadConfig,
    user: settings.Settings,
    console: Console,
    steps: LoadSteps,
    progress: Callable[[LoadProgress], None] | None,
) -> Session:
    """What fits, loaded. Kernels that fail leave the reference engine, also where only the plan, and not the user, took
    an option of the fused one's."""
    from dflash_local.service import load_steps

    planned = fitted(pair, load, user, console)
    try:
        with steps.loading(pair.name, planned), _shown(pair, console, progress) as told:
            return open_session(pair, planned, told)
    except KernelError as error:
        if load.engine != "auto" or load.needs_fused:
            raise
        console.warn(f"{load_steps.WORDS[load_steps.REFERENCE]} is taken, which is slower: {error}")
    planned = fitted(pair, load_steps.lowered(load, load_steps.REFERENCE), user, console)
    with steps.loading(pair.name, planned), _shown(pair, console, progress) as told:
        return open_session(pair, planned, told)


@contextmanager
def _shown(
    pair: Pair, console: Console, progress: Callable[[LoadProgress], None] | None
) -> Iterator[Callable[[LoadProgress], None]]:
    """How far a load is goes to ``progress``, else to the console."""
    if progress is not None:
        yield progress
        return
    with console.progress() as line:
        yield lambda event: line(f"loading {pair.name}: {event.stage}", event.fraction)


def load_steps_of(load: LoadConfig, user: settings.Settings) -> LoadSteps:
    """What is remembered of loads on the card; of a load elsewhere nothing is."""
    from dflash_local import __version__
    from dflash_local.planner import hardware, software
    from dflash_local.service.load_steps import LoadSteps
    from dflash_local.store.paths import loads_folder

    driver = hardware.nvidia_driver() if load.device not in ("cpu", "mps") else None
    versions = {name: software.version_of(name) for name in ("torch", "triton")}
    versions |= {software.OURS: __version__, "driver": driver.version if driver is not None else None}
    return LoadSteps(loads_folder(user) if driver is not None else None, versions)


class HeldService(Service):
    """A service that lets go of the pair's files when it is closed."""

    def __init__(self, session: Session, hold: ExitStack, load_again: Callable[[], Session]) -> None:
        super().__init__(session, load_again=load_again)
        self._hold = hold

    def close(self) -> None:
        """Close the session, then let others remove its files."""
        super().close()
        self._hold.close()


def start_service(pair: Pair, load: LoadConfig, user: settings.Settings, console: Console) -> Service:
    """A service over the loaded pair, to be used in a ``with``; over a running server's, where one has it."""
    elsewhere = attached(pair, load, user, console)
    if elsewhere is not None:
        return Service(elsewhere)
    with ExitStack() as stack:
        stack.enter_context(held(pair, user))

        def opened() -> Session:
            return open_stepwise(pair, load, user, console)

        return HeldService(opened(), stack.pop_all(), opened)
