"""The pairs of this machine as all windows see them: one download at a time, one pair loaded.

Draws nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from dflash_local.app.load_choices import LoadChoice
from dflash_local.app.model_entries import ModelEntry, in_order
from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import BusyError, DFlashError, DoesNotFitError, Interrupted, UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.tables import listing
from dflash_local.ui.downloads import Download
from dflash_local.ui.web.jobs import Job


class Pull:
    """A download. It goes on when every window is closed.

    Args:
        draft: False leaves the drafter out. then: done once all of it is here, such as loading it.

    Attributes:
        job: its thread. notice: the last thing that the store said besides figures.
    """

    def __init__(
        self, served: ServedPair, name: str, draft: bool = True, then: Callable[[], None] | None = None
    ) -> None:
        self.name, self.notice = name, ""
        self._served, self._draft, self._then = served, draft, then
        self._download = Download()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._loading: Job[None] | None = None
        self.job: Job[None] = Job(self._run, self._stop.set)

    def _run(self) -> None:
        self._served.pull(self.name, self._on_event, self._stop.is_set, self._draft)
        if self._then is not None:
            self._loading = Job(self._then)

    def _on_event(self, event: PullProgress | Notice) -> None:
        with self._lock:
            if isinstance(event, PullProgress):
                self._download.take(event)
            else:
                self.notice = event.message

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self.job.running

    def cancel(self) -> None:
        """End it early; finished files stay."""
        self.job.cancel()

    @property
    def figures(self) -> tuple[int, int, str]:
        """Bytes done, bytes in all (0 before they are known), and all of it in words."""
        with self._lock:
            download = self._download
            return download.done, download.total, download.line if download.repos else "asking the Hub"

    @property
    def error(self) -> DFlashError | None:
        """Why it failed, when it is not running any more."""
        return self.job.error

    @property
    def failed(self) -> bool:
        """True when it ended without all of it here, or what was to follow failed."""
        following = self._loading
        return self.error is not None or (following is not None and not following.running and bool(following.error))

    @property
    def verdict(self) -> str:
        """What came of it, in a sentence."""
        error = self.error
        if error is None:
            here = f"{self.name} is on this machine now, every file verified."
            return f"{here} It was not loaded: {self._loading.error}" if self.failed and self._loading else here
        if isinstance(error, Interrupted):
            return f"The download of {self.name} was cancelled: {error}"
        return f"{self.name} was not downloaded: {error}"


class ModelsView:
    """What the Models tab and its endpoints do. Every method may be called from any thread."""

    def __init__(self, served: ServedPair) -> None:
        self.served = served
        self._lock = threading.Lock()
        self._pull: Pull | None = None
        self._removed = 0

    @property
    def pull(self) -> Pull | None:
        """The download under way, else the last one."""
        return self._pull

    @property
    def version(self) -> str:
        """Another text whenever the table may have changed."""
        pull, status = self._pull, self.served.resident.status
        pulled = "" if pull is None else f"{id(pull)} {pull.running}"
        return f"{pulled}/{self._removed}/{status.model}/{status.state}"

    def entries(self) -> Sequence[ModelEntry]:
        """The pairs of the registry, what is here first; may take a second.

        Raises:
            DFlashError: the registry cannot be read.
        """
        return in_order(self.served.entries())

    def entry(self, name: str) -> ModelEntry:
        """The pair of that name.

        Raises:
            UnknownModelError: the registry has none.
        """
        return self.served.entry(name)

    def load(self, name: str) -> str:
        """Have a pair in memory in place of the one that is loaded; says what was loaded.

        Raises:
            UsageError: it is not on this machine. DFlashError: it cannot be loaded.
        """
        resident = self.served.resident
        if not self.served.decided and not resident.model.answers_to(name):
            entry = self.entry(name)
            if not entry.here:
                raise UsageError(f"{entry.name} is not on this machine", "download it first")
            name = entry.name
        resident.switch(name)
        return self.status_line

    def load_as(self, name: str, quantize: str | None, context: int | None, draft: bool) -> str:
        """Load a pair, or one of its pre-quantised targets, with options; says what was loaded.

        Raises:
            UsageError: it is not on this machine, or cannot be rounded to that. DoesNotFitError: not so.
            DFlashError: it cannot be loaded.
        """
        found = self.served.load_choices(name, context, draft)
        ways = found.choices if found is not None else ()
        own = [each for each in ways if found is not None and each.model == found.name]
        asked = [each for each in own if each.config.quantize == quantize]
        if found is not None and not asked:
            formats = [each.config.quantize for each in own if each.config.quantize]
            raise UsageError(f"{name} cannot be loaded as {quantize}", f"known: {listing(formats) or 'none'}")
        if not asked or not asked[0].here:
            raise UsageError(f"{name} is not on this machine", "download it first")
        choice = next((each for each in asked if each.fits), asked[0])
        if not choice.fits:
            raise DoesNotFitError(choice.plan.reason)
        self.served.load(choice)
        return self.status_line

    def unload(self) -> str:
        """Give its memory back; says how it is then."""
        self.served.resident.unload()
        return self.status_line

    @property
    def status_line(self) -> str:
        """How the pair is that page and endpoint share, in a sentence."""
        status, facts = self.served.resident.status, self.served.resident.facts
        if status.state == "broken":
            return f"{status.model} cannot be used: {status.error}"
        if status.state == "loading":
            return f"{status.model} is being loaded."
        if status.state == "unloaded" or facts is None:
            return f"{status.model} is not loaded; the next request loads it."
        if facts.in_server:
            return f"{status.model}: replies come from {facts.loaded_as} ({facts.promise})."
        return (
            f"{status.model} is loaded: {facts.loaded_as}; "
            f"block {facts.block_size}, context {facts.context:,} ({facts.promise})."
        )

    def download(self, name: str) -> Pull:
        """Begin the download of a pair, or of one of its pre-quantised targets with the drafter.

        Raises:
            UnknownModelError: no such pair. BusyError: another download is under way.
        """
        entry = self.entry(name)
        if entry.state == "bundled":
            raise UsageError(f"{entry.name} comes with the package", "there is nothing to download")
        variant = self.served.listed_name(name) != name
        return self._begin(lambda: Pull(self.served, name if variant else entry.name))

    def start(self, choice: LoadChoice) -> None:
        """Load a pair in one of its ways; what is not here is downloaded first, and loaded when it has come.

        Raises:
            BusyError: another download is under way. DFlashError: it cannot be loaded.
        """
        load = partial(self.served.load, choice)
        if choice.here:
            load()
        else:
            self._begin(lambda: Pull(self.served, choice.model, choice.config.draft, load))

    def start_by_name(self, name: str) -> None:
        """Load a pair that is here; else begin its download.

        Raises:
            BusyError: another download is under way. DFlashError: see ``load`` and ``download``.
        """
        if self.entry(name).here:
            self.load(name)
        else:
            self.download(name)

    def _begin(self, make: Callable[[], Pull]) -> Pull:
        with self._lock:
            if self._pull is not None and self._pull.running:
                raise BusyError(f"{self._pull.name} is being downloaded", "one at a time: wait for it, or cancel it")
            self._pull = make()
            return self._pull

    def removal(self, name: str) -> str:
        """What ``remove`` would delete and free, in words.

        Raises:
            DFlashError: it cannot be removed.
        """
        return self.served.removal(self._removable(name))

    def remove(self, name: str) -> str:
        """Delete a pair's files; says what was freed.

        Raises:
            DFlashError: it cannot be removed.
        """
        freed = self.served.remove(self._removable(name))
        self._removed += 1
        return freed

    def _removable(self, name: str) -> str:
        entry, pull = self.entry(name), self._pull
        if pull is not None and pull.running and self.served.listed_name(pull.name) == entry.name:
            raise BusyError(f"{pull.name} is being downloaded", "cancel that first")
        return entry.name
