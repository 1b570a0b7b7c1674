"""Two servers of one target, one that drafts and one that does not; or one whose requests may switch that off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_local.errors import EngineError, UsageError
from dflash_local.events import Event
from dflash_local.loaded import HeldCount
from dflash_local.remote.openai_body import uncounted
from dflash_local.request import Request

if TYPE_CHECKING:
    from dflash_local.remote.openai_server import OpenAIServer
    from dflash_local.remote.server_checks import ServerFacts

HOW = (
    "start it on another port as the first, without --speculative-config (others: their options of drafting), "
    "then --plain-url URL"
)
HOW_FIRST = "give the server that drafts as --url, the one that does not as --plain-url"
HOW_LAUNCHED = "its log says why; --engine-args may have changed it"
Cancelled = Callable[[], bool]
Open = Callable[[bool, Cancelled], "OpenAIServer"]


class TwoServers:
    """A backend whose requests in mode ``ar`` go to the server that does not draft.

    Args:
        open_server: attaches to, or launches, the server that drafts (True) or the plain one; broken off where the
            second argument says so.
        in_turn: one runs at a time, since one card has no room for both: a request that wants the other ends it.
    """

    def __init__(self, open_server: Open, in_turn: bool) -> None:
        self._open, self._in_turn = open_server, in_turn
        self._servers: dict[bool, OpenAIServer] = {}
        self._facts: dict[bool, ServerFacts] = {}
        self._server(True, lambda: False)
        if not in_turn:
            self._server(False, lambda: False)

    @property
    def facts(self) -> ServerFacts:
        """The facts of the drafting server."""
        return self._facts[True]

    @property
    def servers(self) -> tuple[OpenAIServer, OpenAIServer]:
        """The drafting server and the plain one, which both run."""
        return self._servers[True], self._servers[False]

    @property
    def both(self) -> tuple[ServerFacts, ServerFacts]:
        """The facts of the drafting server and of the plain one. EngineError: nothing was asked of the latter."""
        if False not in self._facts:
            raise EngineError("the plain server was not launched", "ask it for a reply first")
        return self._facts[True], self._facts[False]

    def generate(self, request: Request, cancelled: Cancelled = lambda: False) -> Iterator[Event]:
        """Answer by the server that the request's mode asks for.

        Raises:
            DFlashError: see ``OpenAIServer.generate``, or it does not start. Interrupted: cancelled while it started.
        """
        if request.mode != "ar":
            return self._server(True, cancelled).generate(request, cancelled)
        return self._server(False, cancelled).generate(replace(request, block_size=None), cancelled)

    def count(self, request: Request) -> int:
        """Raise UsageError: see ``OpenAIServer.count``."""
        raise uncounted()

    def set_aside(self) -> bool:
        """Return False: one reply at a time is compared."""
        return False

    def held(self) -> tuple[HeldCount, ...]:
        """Return nothing: servers do not say."""
        return ()

    def close(self) -> None:
        """End what was launched."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _server(self, drafts: bool, cancelled: Cancelled) -> OpenAIServer:
        if drafts not in self._servers:
            if self._in_turn:
                self.close()
            server = self._servers[drafts] = self._open(drafts, cancelled)
            self._facts[drafts] = server.facts
        return self._servers[drafts]


def require_drafts(facts: ServerFacts, hint: str = HOW_FIRST) -> None:
    """Raise UsageError where the server says that it does not draft."""
    if facts.drafts is False:
        raise UsageError(f"{facts.title} at {facts.url} does not draft: there is nothing to compare", hint)


def require_no_drafts(facts: ServerFacts, hint: str) -> None:
    """Raise UsageError where the server drafts, or does not say though its program would."""
    if facts.drafts or facts.drafts is None and facts.server.tells_drafts:
        what = "drafts" if facts.drafts else "does not report whether it drafts (no counters on its /metrics)"
        raise UsageError(f"{facts.title} at {facts.url} {what}: it cannot be the plain server", hint)
