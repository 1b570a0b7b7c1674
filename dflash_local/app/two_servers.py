"""Two running servers of one target, one that drafts and one that does not: neither switches that for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.app.engine_server import EngineServer
from dflash_local.app.notices import Notify
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import UsageError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.service.service import Service
from dflash_local.service.wrapped import TwoSessions
from dflash_local.settings import Settings

if TYPE_CHECKING:
    from dflash_local.remote.openai_server import ServerSession
    from dflash_local.remote.server_checks import ServerFacts

HOW = (
    "start it on another port as the first, without --speculative-config (SGLang: the --speculative options), "
    "then --plain-url URL"
)


class ServerSessions(TwoSessions):
    """The sessions of both."""

    def __init__(self, drafting: ServerSession, plain: ServerSession) -> None:
        super().__init__(drafting, plain)
        self._servers = (drafting, plain)

    @property
    def both(self) -> tuple[ServerFacts, ServerFacts]:
        """The facts of the drafting server and of the plain one."""
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

    def start(self, pair: Pair, _load: LoadConfig, user: Settings, notify: Notify) -> Service:
        """In place of ``app.loading.start_service``: requests in mode ``ar`` go to the plain server."""
        return Service(self.session(pair, user, notify))

    def session(self, pair: Pair, user: Settings, notify: Notify) -> ServerSessions:
        """The session over both.

        Raises:
            UsageError: they are one server, the first does not draft, or the second does or does not report it.
            DFlashError: one of them does not answer, or serves another model.
        """
        plain_server = EngineServer(self.plain_url, self.drafting.program)
        try:
            plain_endpoint = plain_server.endpoint(user)
        except UsageError as error:
            raise UsageError(error.message.replace("--url", "--plain-url"), error.hint) from None
        if plain_endpoint.url == self.drafting.endpoint(user).url:
            raise UsageError("--url and --plain-url are the same server", HOW)
        drafted = self.drafting.session(pair, self.drafter, user, notify)
        facts = drafted.facts
        if facts.drafts is False:
            raise UsageError(
                f"{facts.title} at {facts.url} does not draft: there is nothing to compare",
                "give the server with --speculative-config as --url, the one without as --plain-url",
            )
        plain = plain_server.attach(pair, None, user)
        there = plain.facts
        if there.drafts is not False:
            what = "drafts" if there.drafts else "does not report whether it drafts (no counters on its /metrics)"
            raise UsageError(f"{there.title} at {there.url} {what}: it cannot be the plain server", HOW)
        if there.program != facts.program:
            raise UsageError(
                f"{facts.title} and {there.title} compute differently: both servers must be of one program", HOW
            )
        notify(Notice(f"plain replies come from {there.loaded_as}"))
        if plain_endpoint.in_the_clear:
            notify(Notice(f"the token goes unencrypted to {there.url}: use https, or ssh -L", "warning"))
        return ServerSessions(drafted, plain)
