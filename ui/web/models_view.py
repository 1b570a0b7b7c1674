"""The pairs of this machine as all windows see them: one download at a time, one pair loaded.

Knows the backend; draws nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dflash_local.errors import BusyError, DFlashError, Interrupted, UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.ui.downloads import Download
from dflash_local.ui.offers import Offer, in_order
from dflash_local.ui.readings import precision
from dflash_local.ui.web.backend import Backend
from dflash_local.ui.web.jobs import Job


class Pull:
    """A download. It goes on when every window is closed.

    Attributes:
        job: its thread. notice: the last thing that the store said besides figures.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self.name, self.notice = name, ""
        self._download = Download()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.job: Job[None] = Job(lambda: backend.pull(name, self._hear, self._stop.is_set), self._stop.set)

    def _hear(self, event: PullProgress | Notice) -> None:
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
    def verdict(self) -> str:
        """What came of it, in a sentence."""
        error = self.error
        if error is None:
            return f"{self.name} is on this machine now, every file verified."
        if isinstance(error, Interrupted):
            return f"The download of {self.name} was cancelled: {error}"
        return f"{self.name} was not downloaded: {error}"


class ModelsView:
    """What the Models tab and its endpoints do. Every method may be called from any thread."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
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
        pull, status = self._pull, self.backend.resident.status
        pulled = "" if pull is None else f"{id(pull)} {pull.running}"
        return f"{pulled}/{self._removed}/{status.model}/{status.state}"

    def offers(self) -> Sequence[Offer]:
        """The pairs of the registry, what is here first; may take a second.

        Raises:
            DFlashError: the registry cannot be read.
        """
        return in_order(self.backend.offers())

    def offer(self, name: str) -> Offer:
        """The pair of that name.

        Raises:
            UnknownModelError: the registry has none.
        """
        return self.backend.offer(name)

    def load(self, name: str) -> str:
        """Have a pair in memory in place of the one that is loaded; says what was loaded.

        Raises:
            UsageError: it is not on this machine. DFlashError: it cannot be loaded.
        """
        resident = self.backend.resident
        if not resident.model.answers_to(name):
            offer = self.offer(name)
            if not offer.here:
                raise UsageError(f"{offer.name} is not on this machine", "download it first")
            name = offer.name
        resident.switch(name)
        return self.standing

    def unload(self) -> str:
        """Give its memory back; says how it is then."""
        self.backend.resident.unload()
        return self.standing

    @property
    def standing(self) -> str:
        """How the pair is that page and endpoint share, in a sentence."""
        status, facts = self.backend.resident.status, self.backend.resident.facts
        if status.state == "broken":
            return f"{status.model} cannot be used: {status.error}"
        if status.state == "loading":
            return f"{status.model} is being loaded."
        if status.state == "unloaded" or facts is None:
            return f"{status.model} is not loaded; the next request loads it."
        return (
            f"{status.model} is loaded: {facts.loaded_as}; "
            f"block {facts.block_size}, context {facts.context:,} ({precision(facts.dtype)})."
        )

    def download(self, name: str) -> Pull:
        """Begin a download.

        Raises:
            UnknownModelError: no such pair. BusyError: another download is under way.
        """
        offer = self.offer(name)
        if offer.state == "bundled":
            raise UsageError(f"{offer.name} comes with the package", "there is nothing to download")
        with self._lock:
            if self._pull is not None and self._pull.running:
                raise BusyError(f"{self._pull.name} is being downloaded", "one at a time: wait for it, or cancel it")
            self._pull = Pull(self.backend, offer.name)
            return self._pull

    def removal(self, name: str) -> str:
        """What ``remove`` would delete and free, in words.

        Raises:
            DFlashError: it cannot be removed.
        """
        return self.backend.removal(self._removable(name))

    def remove(self, name: str) -> str:
        """Delete a pair's files; says what was freed.

        Raises:
            DFlashError: it cannot be removed.
        """
        said = self.backend.remove(self._removable(name))
        self._removed += 1
        return said

    def _removable(self, name: str) -> str:
        offer, pull = self.offer(name), self._pull
        if pull is not None and pull.running and pull.name == offer.name:
            raise BusyError(f"{pull.name} is being downloaded", "cancel that first")
        return offer.name
