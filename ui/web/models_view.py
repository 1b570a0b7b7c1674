"""The pairs of this machine as all windows see them: one download at a time, one pair loaded.

Draws nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from dflash_local.app.load_choices import LoadChoice
from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import BusyError, Interrupted
from dflash_local.ui.downloads import PullJob
from dflash_local.ui.job import Job


class Pull(PullJob):
    """A download, and the load that follows it. It goes on when every window is closed."""

    def __init__(
        self, served: ServedPair, name: str, draft: bool = True, load: Callable[[], None] | None = None
    ) -> None:
        self.load: Job[None] | None = None

        def then() -> None:
            self.load = Job(load) if load is not None else None

        super().__init__(name, lambda hear, cancelled: served.pull(name, hear, cancelled, draft), then)

    @property
    def failed(self) -> bool:
        """True when it ended without all of it here, or what was to follow failed."""
        return self.error is not None or (self.load is not None and self.load.error is not None)

    @property
    def verdict(self) -> str:
        """Say what came of it, in a sentence."""
        error = self.error
        if error is None:
            here = f"{self.name} is on this machine now, every file verified."
            return f"{here} It was not loaded: {self.load.error}" if self.load is not None and self.load.error else here
        if isinstance(error, Interrupted):
            return f"The download of {self.name} was cancelled: {error}"
        return f"{self.name} was not downloaded: {error}"


class ModelsView:
    """Loads, downloads and removes for the Models tab of every window. Its methods may be called from any thread.

    Attributes:
        pull: the download under way, else the last one.
    """

    def __init__(self, served: ServedPair) -> None:
        self.served = served
        self.pull: Pull | None = None
        self._lock = threading.Lock()
        self._removed = 0

    @property
    def pulling(self) -> bool:
        return self.pull is not None and self.pull.running

    @property
    def version(self) -> str:
        """Is another text whenever the table may have changed."""
        status = self.served.service.status
        return f"{id(self.pull)} {self.pulling}/{self._removed}/{status.model}/{status.state}"

    @property
    def status_line(self) -> str:
        """Says in a sentence how the pair is that page and endpoint share."""
        status, facts = self.served.service.status, self.served.service.facts
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

    def start(self, choice: LoadChoice) -> None:
        """Load a pair in one of its ways; what is not here is downloaded first, and loaded when it has come.

        Raises:
            BusyError: another download is under way. DFlashError: it cannot be loaded.
        """
        load = partial(self.served.service.switch, choice.model, choice.config)
        if choice.here:
            load()
        else:
            self._begin(lambda: Pull(self.served, choice.model, choice.config.draft, load))

    def start_by_name(self, name: str) -> None:
        """Load a pair that is here; else begin its download.

        Raises:
            UnknownModelError: no such pair. BusyError: another download is under way. DFlashError: it cannot be loaded.
        """
        entry = self.served.entry(name)
        if entry.here:
            self.served.service.switch(entry.name)
        else:
            self._begin(lambda: Pull(self.served, entry.name))

    def _begin(self, make: Callable[[], Pull]) -> None:
        with self._lock:
            if self.pull is not None and self.pull.running:
                raise BusyError(f"{self.pull.name} is being downloaded", "one at a time: wait for it, or cancel it")
            self.pull = make()

    def remove(self, name: str) -> str:
        """Delete a pair's files; says what was freed.

        Raises:
            BusyError: it is being downloaded. DFlashError: it cannot be removed.
        """
        entry, pull = self.served.entry(name), self.pull
        if pull is not None and pull.running and self.served.listed_name(pull.name) == entry.name:
            raise BusyError(f"{pull.name} is being downloaded", "cancel that first")
        freed = self.served.remove(entry.name)
        self._removed += 1
        return freed
