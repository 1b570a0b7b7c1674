"""A running or launched server of another program as the resident service keeps it, for the endpoint and the page."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from dflash_local.app.engine_launch import LaunchedSession, LaunchingEngine, program_of
from dflash_local.app.engine_server import EngineServer, known_pair
from dflash_local.app.notices import Notify
from dflash_local.app.resident_model import names_of
from dflash_local.app.thinking import default_thinking
from dflash_local.app.two_servers import TwoServers
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import LoadProgress, Mode, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.remote.endpoint import within
from dflash_local.remote.server_checks import PROGRAMS, served_models
from dflash_local.service.resident import Model
from dflash_local.service.service import Session
from dflash_local.settings import Settings

NAMES_S = 2.0  # a status waits for them, and those that ask for it wait 5 s (``remote.serve_status``)


class ResidentServer(ABC):
    """A server in place of pairs that are loaded here; see ``resident_server``.

    Attributes:
        label: what stands for it in messages. runs: it runs whatever this program does, so that nothing unloads it.
    """

    label: str
    runs: bool
    mode: Mode = "dflash"

    def __init__(self, drafter: str | None, user: Settings, notify: Notify) -> None:
        self._drafter, self._user, self._notify = drafter, user, notify

    @property
    def decides(self) -> str:
        """Why nothing is loaded in its place, in a line."""
        return f"{self.label} decides what is loaded, and how"

    def model(self, pair: Pair, thinking: bool) -> Model:
        """The pair that it serves; loading it is checking the server, or launching one."""
        name, aliases = names_of(pair, self._user)

        def load(progress: Callable[[LoadProgress], None]) -> Session:
            def forward(event: Notice | LoadProgress) -> None:
                if isinstance(event, LoadProgress):
                    progress(event)
                else:
                    self._notify(event)

            return self._session(pair, forward)

        return Model(
            name=name,
            load=load,
            aliases=aliases,
            sampling=sampling_defaults(open_source(pair.target), pair.sampling),
            thinking=thinking,
            mode=self.mode,
            call_format="server",
            kept_by=self.label if self.runs else "",
            lost=self._end,
        )

    def find(self, name: str, load: LoadConfig | None) -> Model:
        """Another model of it, known to be served before anything that runs is touched.

        Raises:
            UsageError: the server decides that. UnknownModelError: it does not serve it. ServerError: it is gone.
        """
        if load is not None:
            raise UsageError(self.decides, "end it, and start it as wanted")
        return self._other(name)

    def pair(self, name: str) -> Pair:
        """What is known here of a pair that it serves."""
        return known_pair(name, None, self._user)

    def names(self) -> tuple[str, ...]:
        """The models that ``find`` may find."""
        return ()

    @abstractmethod
    def check(self, pair: Pair) -> None:
        """Ask whether it will do, before anything is served.

        Raises:
            DFlashError: it will not.
        """

    @abstractmethod
    def close(self) -> None:
        """Break off a launch that is under way."""

    @abstractmethod
    def _session(self, pair: Pair, notify: Notify) -> Session: ...

    @abstractmethod
    def _other(self, name: str) -> Model: ...

    def _end(self) -> DFlashError | None:
        """Why it has ended, where that is known without asking it."""
        return None


class RunningServer(ResidentServer):
    """One that runs already, or two of them."""

    runs = True

    def __init__(
        self, server: EngineServer, plain_url: str | None, drafter: str | None, user: Settings, notify: Notify
    ) -> None:
        super().__init__(drafter, user, notify)
        self.label = f"the server at {server.endpoint(user).url}"
        self._server, self._plain_url = server, plain_url

    def check(self, pair: Pair) -> None:
        """Both are asked, where there are two."""
        self._session(pair, lambda _event: None).close()

    def close(self) -> None:
        """Nothing of it is here."""

    def names(self) -> tuple[str, ...]:
        """The models that it serves now; none while it does not answer."""
        with suppress(DFlashError):
            return tuple(model.id for model in served_models(self._server.endpoint(self._user), within(NAMES_S)))
        return ()

    def _session(self, pair: Pair, notify: Notify) -> Session:
        if self._plain_url is None:
            return self._server.session(pair, self._drafter, self._user, notify)
        return TwoServers(self._server, self._plain_url, self._drafter).session(pair, self._user, notify)

    def _other(self, name: str) -> Model:
        pair = self.pair(name)
        self._server.attach(pair, None, self._user)
        return self.model(pair, default_thinking(pair))


class LaunchedForOne(ResidentServer):
    """One that is launched when its model is wanted, and ended where that is unloaded."""

    runs = False

    def __init__(self, engine: LaunchingEngine, drafter: str | None, user: Settings, notify: Notify) -> None:
        super().__init__(drafter, user, notify)
        self.label = f"the launched {PROGRAMS[engine.program]}"
        self.mode = "dflash" if engine.drafts else "ar"
        self._engine = engine
        self._launched: LaunchedSession | None = None
        self._closing = threading.Event()

    def check(self, pair: Pair) -> None:
        """Whether its program is installed."""
        program_of(self._engine.program, self._user)

    def close(self) -> None:
        """Once for all: nothing is launched any more."""
        self._closing.set()

    def _session(self, pair: Pair, notify: Notify) -> Session:
        self._launched = None
        found = self._engine.session(pair, self._drafter, self._user, notify, self._closing.is_set)
        self._launched = found
        return found

    def _other(self, name: str) -> Model:
        raise UsageError(self.decides, "end it, and start another one with that model")

    def _end(self) -> DFlashError | None:
        return self._launched.server.end if self._launched is not None else None


def resident_server(
    source: EngineServer | LaunchingEngine,
    drafter: str | None,
    user: Settings,
    notify: Notify,
    plain_url: str | None = None,
) -> ResidentServer:
    """What takes the place of pairs that are loaded here.

    Args:
        drafter: that the server is to draft with, instead of the registry's.
        plain_url: of a second running server, which does not draft.

    Raises:
        UsageError: a bad address.
    """
    if isinstance(source, EngineServer):
        return RunningServer(source, plain_url, drafter, user, notify)
    return LaunchedForOne(source, drafter, user, notify)
