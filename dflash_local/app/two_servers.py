"""Two servers of one target, one that drafts and one that does not: neither program switches that for one request.

They run already, or are launched one after the other: one card has no room for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from dflash_local.app.engine_server import EngineServer
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import EngineError, UsageError
from dflash_local.events import Event, Mode, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.request import Request
from dflash_local.service.race import MODES
from dflash_local.service.service import Service, Session
from dflash_local.service.wrapped import TwoSessions
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.remote.openai_server import ServerSession
    from dflash_local.remote.server_checks import Program, ServerFacts

HOW = (
    "start it on another port as the first, without --speculative-config (SGLang: the --speculative options), "
    "then --plain-url URL"
)
HOW_FIRST = "give the server with --speculative-config as --url, the one without as --plain-url"
HOW_LAUNCHED = "its log says why; --engine-args may have changed it"
Both = tuple["ServerFacts", "ServerFacts"]
Cancelled = Callable[[], bool]


class ComparedSession(Session, Protocol):
    """Requests in mode ``ar`` go to the server that does not draft."""

    @property
    def both(self) -> Both:
        """The facts of the drafting server and of the plain one, once both have answered."""


class ComparedServers(Protocol):
    """What replies are compared over.

    Attributes:
        order: of replies that costs least.
    """

    @property
    def order(self) -> tuple[Mode, Mode]: ...

    def start(self, pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> Service:
        """In place of ``app.loading.start_service``."""

    def session(self, pair: Pair, user: Settings, notify: Notify) -> ComparedSession:
        """The session over both.

        Raises:
            UsageError: the first does not draft, or the second does or does not report it.
            DFlashError: one of them does not answer or start, or serves another model.
        """


class ServerSessions(TwoSessions):
    """The sessions of both."""

    def __init__(self, drafting: ServerSession, plain: ServerSession) -> None:
        super().__init__(drafting, plain)
        self._servers = (drafting, plain)

    @property
    def both(self) -> Both:
        """See ``ComparedSession``."""
        drafting, plain = self._servers
        return drafting.facts, plain.facts


@dataclass(frozen=True, slots=True)
class TwoServers:
    """The server that drafts, and the address of the one that does not.

    Attributes:
        drafter: that the first is to draft with, instead of the registry's.
    """

    drafting: EngineServer
    plain_url: str
    drafter: str | None = None

    @property
    def order(self) -> tuple[Mode, Mode]:
        """As everywhere."""
        return MODES

    def start(self, pair: Pair, _load: LoadConfig, user: Settings, notify: Notify) -> Service:
        """In place of ``app.loading.start_service``: requests in mode ``ar`` go to the plain server."""
        return Service(self.session(pair, user, notify))

    def session(self, pair: Pair, user: Settings, notify: Notify) -> ServerSessions:
        """See ``ComparedServers``. UsageError: they are one server, too."""
        return ServerSessions(*self.attached(pair, user, notify))

    def attached(self, pair: Pair, user: Settings, notify: Notify) -> tuple[ServerSession, ServerSession]:
        """The sessions of the drafting server and of the plain one. Raises what ``session`` does."""
        plain_server = EngineServer(self.plain_url, self.drafting.program)
        try:
            plain_endpoint = plain_server.endpoint(user)
        except UsageError as error:
            raise UsageError(error.message.replace("--url", "--plain-url"), error.hint) from None
        if plain_endpoint.url == self.drafting.endpoint(user).url:
            raise UsageError("--url and --plain-url are the same server", HOW)
        drafted = self.drafting.session(pair, self.drafter, user, notify)
        facts = drafted.facts
        require_drafts(facts)
        plain = plain_server.attach(pair, None, user)
        there = plain.facts
        _require_no_drafts(there, HOW)
        if there.program != facts.program:
            raise UsageError(
                f"{facts.title} and {there.title} compute differently: both servers must be of one program", HOW
            )
        notify(Notice(f"plain replies come from {there.loaded_as}"))
        if plain_endpoint.in_the_clear:
            notify(Notice(f"the token goes unencrypted to {there.url}: use https, or ssh -L", "warning"))
        return drafted, plain


def require_drafts(facts: ServerFacts, hint: str = HOW_FIRST) -> None:
    """UsageError: the server says that it does not draft."""
    if facts.drafts is False:
        raise UsageError(f"{facts.title} at {facts.url} does not draft: there is nothing to compare", hint)


def _require_no_drafts(facts: ServerFacts, hint: str) -> None:
    if facts.drafts is not False:
        what = "drafts" if facts.drafts else "does not report whether it drafts (no counters on its /metrics)"
        raise UsageError(f"{facts.title} at {facts.url} {what}: it cannot be the plain server", hint)


class SessionInTurn:
    """The session of two servers of which one runs at a time.

    The drafting one is launched at once. A request that wants the other ends the one that runs and launches that.

    Args:
        launch: a server with or without drafts while it is entered; broken off where the second argument says so.
    """

    def __init__(self, launch: Callable[[bool, Cancelled], AbstractContextManager[ServerSession]]) -> None:
        self._launch = launch
        self._server = ExitStack()
        self._running: tuple[bool, ServerSession] | None = None
        self._facts: dict[bool, ServerFacts] = {}
        self._use(True, lambda: False)

    @property
    def facts(self) -> ServerFacts:
        """Of the drafting server."""
        return self._facts[True]

    @property
    def both(self) -> Both:
        """See ``ComparedSession``. EngineError: nothing was asked of the plain one."""
        if False not in self._facts:
            raise EngineError("the plain server was not launched", "ask it for a reply first")
        return self._facts[True], self._facts[False]

    def generate(self, request: Request, cancelled: Cancelled = lambda: False) -> Iterator[Event]:
        """By the server that the request's mode asks for.

        Raises:
            DFlashError: see ``ServerSession.generate``, or it does not start. Interrupted: cancelled while it started.
        """
        if request.mode != "ar":
            return self._use(True, cancelled).generate(request, cancelled)
        return self._use(False, cancelled).generate(replace(request, block_size=None), cancelled)

    def close(self) -> None:
        """End the one that runs."""
        self._running = None
        self._server.close()

    def _use(self, drafts: bool, cancelled: Cancelled) -> ServerSession:
        if self._running is not None and self._running[0] == drafts:
            return self._running[1]
        self.close()
        session = self._server.enter_context(self._launch(drafts, cancelled))
        self._running, self._facts[drafts] = (drafts, session), session.facts
        return session


@dataclass(frozen=True, slots=True)
class ServersInTurn:
    """The same server with and without its drafter, launched when it is needed.

    Attributes:
        extra: arguments of the program behind those of the registry. drafter: see ``TwoServers``.
    """

    program: Program
    extra: tuple[str, ...] = ()
    drafter: str | None = None

    @property
    def order(self) -> tuple[Mode, Mode]:
        """With drafts first: the plain server is asked for margins in the end."""
        return "dflash", "ar"

    def start(self, pair: Pair, _load: LoadConfig, user: Settings, notify: Notify) -> Service:
        """In place of ``app.loading.start_service``."""
        return Service(self.session(pair, user, notify))

    def session(self, pair: Pair, user: Settings, notify: Notify) -> SessionInTurn:
        """See ``ComparedServers``."""
        return SessionInTurn(partial(self.launched, pair, user, notify))

    @contextmanager
    def launched(
        self, pair: Pair, user: Settings, notify: Notify, drafts: bool, cancelled: Cancelled = lambda: False
    ) -> Iterator[ServerSession]:
        """One of the two, which ends with the context.

        Raises:
            DFlashError: see ``session``.
        """
        from dflash_local.app.engine_launch import LaunchingEngine

        engine = LaunchingEngine(self.program, self.extra, drafts)
        server, session = engine.launched(pair, self.drafter if drafts else None, user, notify, cancelled)
        with server:
            if drafts:
                require_drafts(session.facts, HOW_LAUNCHED)
            else:
                _require_no_drafts(session.facts, HOW_LAUNCHED)
            yield session
