"""Downloading pairs: what is to be fetched, whether it will fit into memory, and fetching and verifying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dflash_local import settings
from dflash_local.app.fitting import machine, shapes
from dflash_local.app.models import ModelStore, registry
from dflash_local.app.notices import Notify
from dflash_local.app.recommending import row_summary, summary
from dflash_local.app.resolve import Choice, choose, package_plan, refuse_what_does_not_run, wanted, with_local_mirror
from dflash_local.errors import UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.settings import Settings
from dflash_local.tables import UNKNOWN, amount, listing, rate

if TYPE_CHECKING:
    from dflash_local.app.recommending import Summary
    from dflash_local.planner.machine import Machine
    from dflash_local.store.hub import Hub
    from dflash_local.store.local import Local
    from dflash_local.store.package import PackagePlan
    from dflash_local.store.pull import PullPlan, Wanted

NAMED = 3  # pairs that are named in the place of one that is too slow, at most

OnPull = Callable[[PullProgress | Notice], None]


@dataclass(frozen=True, slots=True)
class Download:
    """Holds what is to be fetched, ready to run.

    Attributes:
        verdicts: of the planner, by the names of the pairs it is for, on the machine ``where``. slow: sentences on
            those that would be too slow there.
        packages: files of packages that belong to it.
    """

    plan: PullPlan
    verdicts: dict[str, str]
    slow: tuple[str, ...]
    where: Machine
    hub: Hub
    store: ModelStore
    packages: tuple[PackagePlan, ...] = ()

    @property
    def ready(self) -> bool:
        """Say whether all of it is here and proven."""
        return self.plan.ready and all(each.ready for each in self.packages)

    @property
    def totals(self) -> dict[str, int]:
        """Return bytes of what is not here yet, by the names that events have for it."""
        files = {each.package.label: each.package.wheel_bytes for each in self.packages if not each.ready}
        return files | {item.repo: item.total for item in self.plan.repos if not item.ready}

    @property
    def to_fetch(self) -> int:
        """Return bytes that must come over the network."""
        return self.plan.to_fetch + sum(each.to_fetch for each in self.packages)

    def check_disk(self) -> None:
        """Raise DoesNotFitError when a disk has no room for it."""
        self.plan.check_disk()
        for each in self.packages:
            if not each.ready:
                each.check_disk()

    def run(self, on_event: OnPull, cancelled: Callable[[], bool], allow_mismatch: bool = False) -> tuple[Local, ...]:
        """Fetch and verify it; both callables are used on the download's threads.

        Raises:
            Interrupted: cancelled; says what is kept. DownloadError and others: see ``store.pull.pull``.
        """
        from dflash_local.store import package
        from dflash_local.store.pull import pull

        store = self.store
        files = [package.fetch(each, store.locks, self.hub.offline, on_event, cancelled) for each in self.packages]
        found = pull(
            self.plan,
            self.hub,
            store.cache,
            store.manifests,
            store.locks,
            on_event=on_event,
            cancelled=cancelled,
            allow_mismatch=allow_mismatch,
        )
        return (*files, *found)


def prepare(
    needs: Sequence[Wanted],
    choices: Sequence[Choice],
    user: Settings,
    update: bool = False,
    xet: bool = False,
    notify: Notify | None = None,
) -> Download:
    """Ask the Hub what there is to fetch.

    Args:
        choices: what it is for; tells whether it will fit into memory. update: ask what a revision means today.
        xet: see ``store.hub.Hub``. notify: lets a CPU be probed, see ``fitting.machine``.

    Raises:
        DownloadError: see ``store.pull.prepare``.
    """
    from dflash_local.store import pull
    from dflash_local.store.hub import Hub

    settings.quiet_libraries()
    store, hub = ModelStore.of(user), Hub.of(user, xet)
    plan = pull.prepare(needs, hub, store.cache, store.manifests, update=update)
    where = machine(user, notify=notify)
    found = [settings_summary(choice, where, user, store) for choice in choices]
    verdicts = {each.pair: each.fits for each in found}
    slow = tuple(filter(None, (slow_here(each, where, user) for each in found)))
    packages = tuple(filter(None, dict.fromkeys(package_plan(choice, store) for choice in choices)))
    return Download(plan, verdicts, slow, where, hub, store, packages)


def settings_summary(choice: Choice, where: Machine, user: Settings, store: ModelStore) -> Summary:
    """Sum up a pair as the user's settings load it; as if there were none where they do not suit it."""
    known = shapes(choice, store)
    try:
        return summary(choice, known, where, user, user.load_config, variants=False)
    except UsageError:  # which a load says
        return summary(choice, known, where, user, variants=False)


class BeforeDownload(NamedTuple):
    """Holds what is to be known before a download: the target's licence, and the room for it."""

    licence: str
    disk: str


def before_download(choice: Choice, user: Settings) -> BeforeDownload:
    """Tell what is to be known before a download of what a name means; asks nobody on the network."""
    from dflash_local.planner.hardware import folder

    row, where = choice.row, user.hub.cache
    described = None if row is None else row.variant(choice.name) or row
    licence = None if described is None else described.licence
    disk = "" if where is None else f"{amount(folder(where).free)} free for {where}"
    return BeforeDownload(licence or UNKNOWN, disk)


def slow_here(found: Summary, where: Machine, user: Settings) -> str:
    """Say that a pair would be too slow for a chat on a machine, and which would not be; nothing where it would not be,
    or no
    speed is predicted.
    """
    if not found.slow:
        return ""
    known = [row_summary(row, where, user) for row in registry(user).rows if row.runs_here and not row.bundled]
    rates = {each.pair: each.tokens_per_s for each in known if each.tokens_per_s is not None and not each.slow}
    usable = sorted(rates.items(), key=lambda item: -item[1])
    named = listing([f"{name} ({rate(speed)} tokens/s)" for name, speed in usable], NAMED)
    others = f"usable here: {named}" if named else "no pair of the registry reaches that here"
    return f"{found.pair} {found.slow}; {others}"


def pull(name: str, user: Settings, on_event: OnPull, cancelled: Callable[[], bool], draft: bool = True) -> None:
    """Download and verify a pair, also one that will not fit into memory: who calls this has asked before.

    Args:
        draft: False leaves the drafter out.

    Raises:
        Interrupted: cancelled; says what is kept. DoesNotFitError: the disk has no room.
        DFlashError: no such pair, or see ``store.pull.pull``.
    """
    choice = choose(name, None, user)
    refuse_what_does_not_run(choice)
    if choice.roles:
        choice = with_local_mirror(choice, ModelStore.of(user))
        needs = wanted(choice) if draft else wanted(choice, ("target",))
        download = prepare(needs, [choice], user)
        download.check_disk()
        download.run(on_event, cancelled)
