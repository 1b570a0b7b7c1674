"""Loads a pair: as it fits, a step slower after a load that ended the program, its files held while it is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dflash_local import settings
from dflash_local.app.load_planning import fitted, keep_speed, planned_peak
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import CheckpointError, KernelError, MissingDependencyError, UsageError
from dflash_local.events import LoadProgress, Notice
from dflash_local.load_config import LoadConfig, takes_several
from dflash_local.loaded import Verdict
from dflash_local.settings import Settings
from dflash_local.store.kept import take_unkept
from dflash_local.store.paths import packages_folder, sequences_folder, speeds_folder

if TYPE_CHECKING:
    from dflash_local.engine.session import Session as EngineSession
    from dflash_local.service.backend import Backend
    from dflash_local.service.load_steps import LoadSteps
    from dflash_local.store.adaptations import Adaptation
    from dflash_local.store.said_record import SaidRecord
    from dflash_local.store.sequence_files import SequenceFiles

CHECKED_DEVICE = "cuda"  # what a pair is checked on unasked: on a CPU it would take minutes


@contextmanager
def named_when_missing() -> Iterator[None]:
    """Name the library that an import of ours needs and that is not there.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == "dflash_local":
            raise
        raise MissingDependencyError(f"{library} is not installed", f"pip install {library}") from error


def open_session(
    pair: Pair,
    load: LoadConfig,
    progress: Callable[[LoadProgress], None] | None = None,
    said: SaidRecord | None = None,
) -> EngineSession:
    """Load a pair; takes seconds to minutes. ``said``: as of ``engine.load``.

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
    return engine.load(pair, load, progress, said)


@contextmanager
def held(pair: Pair, user: Settings) -> Iterator[None]:
    """Let other programs know that the pair's repositories are loaded, so that they do not remove them.

    Raises:
        BusyError: one of them is being removed.
    """
    from dflash_local.store import lock

    with ExitStack() as stack:
        for name in _locked_names(pair, user):
            stack.enter_context(lock.using(lock.folder_of(user), name))
        yield


def _locked_names(pair: Pair, user: Settings) -> list[str]:
    """List what locks call that which the pair is loaded from: repositories of the cache, a package."""
    from dflash_local.store.names import repo_of
    from dflash_local.store.package import package_of

    cache, packages = user.hub.cache, packages_folder(user)
    names = [] if packages is None else [package_of(packages, pair.target)]
    for folder in (pair.target, pair.drafter):
        with suppress(ValueError, IndexError):  # elsewhere on the disk
            if folder is not None and cache is not None:
                names.append(repo_of(folder.absolute().relative_to(cache.absolute()).parts[0]))
    return list(dict.fromkeys(name for name in names if name))


def warn_of(session: Backend, notify: Notify) -> None:
    """Tell the notices of a load, and what it found out and could not keep."""
    for notice in (*session.facts.notices, take_unkept()):
        if notice:
            notify(Notice(notice, "warning"))


@contextmanager
def engine_session(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> Iterator[EngineSession]:
    """Load the engine's session itself, closed at the end: measuring looks behind events. It is not checked unasked.

    Raises:
        DFlashError: see ``fitted`` and ``open_session``.
    """
    with held(pair, user):
        notify = _naming(pair, notify)
        session = open_session(_as_measured(pair, load, user, notify), fitted(pair, load, user, notify), notify)
        warn_of(session, notify)
        try:
            yield session
        finally:
            session.close()


def _as_measured(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> Pair:
    """Give a pair what a check found out of what it drafts with, and what its drafter has learnt here.

    Raises:
        CheckpointError: an unreadable file.
    """
    if pair.drafter is None or not load.draft or user.cache_dir is None:
        return pair
    from dflash_local.check.record import measured_keys

    of_layer = measured_keys(user.cache_dir, pair.target) if load.mtp else None
    own = pair.adaptation or _adaptation(pair, load, user, notify)
    return replace(pair, drafter_keys=measured_keys(user.cache_dir, pair.drafter), target_keys=of_layer, adaptation=own)


def _adaptation(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> Adaptation | None:
    """Return what a pair's drafter has learnt; one that cannot be used is told, and left out."""
    from dflash_local.check.record import digest, pair_files
    from dflash_local.store import adaptations

    path = adaptations.path_of(user, pair.drafting_name)
    if path is None or not load.adaptation:
        return None
    try:
        found = adaptations.read(path)
    except CheckpointError as error:
        notify(Notice(f"{error.message}: the drafter is taken as it was published ({error.hint})", "warning"))
        return None
    if found is not None and found.facts["files"] != digest(pair_files(pair)):
        what = f"the files of {pair.name} are others than its drafter was adapted to"
        notify(Notice(f"{what}: it is taken as it was published; dflash adapt {pair.name} adapts it anew", "warning"))
        return None
    return found


def _naming(pair: Pair, notify: Notify) -> Notify:
    """Tell how far the load of a pair is under its name."""

    def forward(event: Notice | LoadProgress) -> None:
        if isinstance(event, LoadProgress):
            event = replace(event, stage=f"loading {pair.name}: {event.stage}")
        notify(event)

    return forward


def checked(
    session: EngineSession, pair: Pair, load: LoadConfig, user: Settings, progress: Callable[[str, float], None]
) -> None:
    """Check a pair at its first load on a card; whatever is found against it is told at every load.

    Of a fine-tune that took another target's drafter the drafter is probed on every device; one that does not serve it
    is not drafted with.

    Args:
        load: as it was asked for. progress: told what is being checked and how far it is (0..1).

    Raises:
        DFlashError: see ``check.run.check``.
    """
    on_card = _on_one_card(session)
    probing = pair.tuned_from is not None and load.draft
    if load.skip_check or not (on_card or probing):
        return
    from dflash_local.check import run
    from dflash_local.check.record import remember

    with ExitStack() as stack:
        stack.callback(session.close)  # where it is interrupted
        path = run.probe_path(pair, load, user.cache_dir) if probing else None
        if on_card:
            planned = planned_peak(pair, session.facts.load, user)
            report = run.checked_once(session, pair, load, user.cache_dir, planned, progress)
            if path is not None and run.remembered(path) is None:
                remember(path, report.of("drafter"))
        else:
            report = run.remembered(path) or run.probed_now(session, pair, path, progress)
        stack.pop_all()
    facts = session.facts
    session.facts = replace(facts, notices=(*facts.notices, *report.notices), checks=report.verdicts)


def _probed_before(pair: Pair, load: LoadConfig, user: Settings) -> tuple[Verdict, ...]:
    """Read what an earlier load or ``dflash check --only drafter`` found of the drafter that a fine-tune took."""
    if pair.tuned_from is None or not load.draft or load.skip_check:
        return ()
    with named_when_missing():
        from dflash_local.check import run
    report = run.remembered(run.probe_path(pair, load, user.cache_dir))
    return () if report is None else report.verdicts


def _refusal_to_draft(pair: Pair, checks: Iterable[Verdict]) -> str:
    """Say that a fine-tune is not drafted for, and why; nothing where what was found does not speak against it."""
    failed = next((each for each in checks if each.subject == "drafter" and each.state == "failed"), None)
    if failed is None or pair.tuned_from is None:
        return ""
    return (
        f"no drafts: the drafter of {pair.tuned_from} does not serve {pair.name}: {failed.text}; {failed.remedy}; "
        f"dflash check {pair.name} --only drafter tries it again"
    )


def open_stepwise(
    pair: Pair, load: LoadConfig, user: Settings, notify: Notify, said: SaidRecord | None = None
) -> EngineSession:
    """Load a pair for replies: a step slower where an earlier load of it on the card ended the program.

    Where drafting was asked for and is not done, the session answers all requests without drafts.

    Raises:
        DFlashError: see ``fitted`` and ``open_session``.
    """
    from dflash_local.service import load_steps

    asked = load
    steps = load_steps_of(load, user)
    if user.safe:
        load, line = load_steps.lowered(load, load_steps.PLAIN), f"DFLASH_SAFE: {load_steps.WORDS[load_steps.PLAIN]}"
    else:
        load, line = steps.begin_with(pair.name, load)
    if line:
        notify(Notice(line, "warning"))
    before = _probed_before(pair, load, user)
    if _refusal_to_draft(pair, before):
        load = replace(load, draft=False)
    session = _opened(pair, load, user, notify, steps, said)
    if not user.safe:
        checked(session, pair, load, user, lambda text, part: notify(LoadProgress(text, part)))
        if _on_one_card(session):
            keep_speed(session, pair, user)
    refused = _refusal_to_draft(pair, before or session.facts.checks)
    if refused:  # its facts say that it drafts no more, and why, in one notice
        facts = session.facts
        others = tuple(text for text in facts.notices if not text.startswith("check of the drafter"))
        checks = tuple(each for each in facts.checks if not before or each.subject != "drafter")
        lowered = replace(facts.load, draft=False)
        session.facts = replace(
            facts, drafter=None, load=lowered, notices=(*others, refused), checks=(*checks, *before)
        )
    warn_of(session, notify)
    session.drafts = not asked.draft or (load.draft and not refused)
    return session


def _on_one_card(session: EngineSession) -> bool:
    device = session.facts.device
    return device.startswith(CHECKED_DEVICE) and not takes_several(device)


def _opened(
    pair: Pair, load: LoadConfig, user: Settings, notify: Notify, steps: LoadSteps, said: SaidRecord | None
) -> EngineSession:
    """Load what fits. Kernels that fail leave the reference engine, unless the user took an option of the others."""
    from dflash_local.service import load_steps

    def opened(load: LoadConfig) -> EngineSession:
        planned = fitted(pair, load, user, notify)
        with steps.loading(pair.name, planned):
            return open_session(_as_measured(pair, load, user, notify), planned, notify, said)

    try:
        return opened(load)
    except KernelError as error:
        if load.engine != "auto" or load.needs_fused:
            raise
        notify(Notice(f"{load_steps.WORDS[load_steps.REFERENCE]} is taken, which is slower: {error}", "warning"))
    return opened(load_steps.lowered(load, load_steps.REFERENCE))


def load_steps_of(load: LoadConfig, user: Settings) -> LoadSteps:
    """Return remember loads on the card; of a load elsewhere nothing is remembered."""
    from dflash_local import __version__
    from dflash_local.planner import hardware, software
    from dflash_local.service.load_steps import LoadSteps
    from dflash_local.store.paths import loads_folder

    driver = hardware.nvidia_driver() if load.device not in ("cpu", "mps") else None
    versions = {name: software.version_of(name) for name in ("torch", "triton")}
    versions |= {software.OURS: __version__, "driver": driver.version if driver is not None else None}
    return LoadSteps(loads_folder(user) if driver is not None else None, versions)


def open_held(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> EngineSession:
    """Load a pair for replies: they are counted, and no other program removes its files until it is closed.

    Raises:
        BusyError: they are being removed. DFlashError: see ``open_stepwise``.
    """
    from dflash_local.chat import template
    from dflash_local.planner.acceptance_record import AcceptanceRecord
    from dflash_local.store.confidence_record import ConfidenceRecord
    from dflash_local.store.said_record import SaidRecord

    with ExitStack() as stack:
        stack.enter_context(held(pair, user))
        template.PROCESS.begin()  # while the weights are read, so that the first message need not wait for it
        said = SaidRecord(speeds_folder(user)) if pair.counted else None
        session = open_stepwise(pair, load, user, notify, said)
        if pair.counted:
            folder, facts = speeds_folder(user), session.facts
            session.observe = partial(AcceptanceRecord(folder).add_reply, pair.name, facts.block_size)
            session.confidences = ConfidenceRecord(folder, f"{pair.name} with {_drafter_of(session)}, {facts.engine}")
            session.said = said
        session.keep_on_disk(_sequence_files(pair, session, user))
        session.locks = stack.pop_all()
        return session


def _drafter_of(session: EngineSession) -> str:
    """Name a loaded drafter, with what it has learnt: its context and its confidences are its own."""
    return ", ".join(filter(None, (session.facts.drafter, session.facts.adapted)))


def _sequence_files(pair: Pair, session: EngineSession, user: Settings) -> SequenceFiles | None:
    """Return where conversations of a pair as it is loaded are kept on disk; None where they are not."""
    from dflash_local.check import record
    from dflash_local.store.sequence_files import SequenceFiles

    root, load = sequences_folder(user), session.facts.load
    if root is None or not load.cache_disk:
        return None
    facts = {**record.facts_of(pair, load), "drafter": _drafter_of(session)}
    return SequenceFiles(root, record.digest(facts), int(load.cache_disk * 2**30))


def open_for_replies(pair: Pair, load: LoadConfig, user: Settings, notify: Notify, keep: bool = False) -> Backend:
    """Load a pair in the engine's process, or in this one where the settings say so.

    Args:
        keep: the process stays when its last client has left.

    Raises:
        DFlashError: see ``open_held`` and ``local_process.open_process``.
    """
    if user.in_process:
        return open_held(pair, load, user, notify)
    from dflash_local.app.local_process import open_process  # `dflash --help` imports this module

    return open_process(pair, load, user, notify, keep)
