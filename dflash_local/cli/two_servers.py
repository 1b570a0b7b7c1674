"""A comparison over two running servers, over launched ones, or of a pair that is loaded here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_local.app.engine_server import EngineServer
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.server_options import Origin, TwoServerOptions, origin
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.load_config import LoadConfig
from dflash_local.service.race import MODES

if TYPE_CHECKING:
    from dflash_local.app.two_servers import ComparedServers


@dataclass(frozen=True, slots=True)
class Compared:
    """Where the replies of a comparison come from.

    Attributes:
        servers: None for a pair that is loaded here.
    """

    origin: Origin
    servers: ComparedServers | None = None

    @property
    def order(self) -> tuple[Mode, Mode]:
        """Of the two replies."""
        return MODES if self.servers is None else self.servers.order


def compared(
    call: Invocation,
    model: str | None,
    drafter: str | None,
    load: LoadConfig,
    served: TwoServerOptions,
) -> Compared:
    """What the options mean; see ``server_options.origin``.

    Raises:
        UsageError: one of them without the other, or see ``origin``. DFlashError: no such pair.
    """
    served.check()
    if served.url is not None and served.plain_url is None:
        from dflash_local.app.two_servers import HOW

        raise UsageError("a server drafts for every request: plain replies need a second one", HOW)
    source = origin(call, model, drafter, load, served)
    if source.server is None:
        return Compared(source)
    from dflash_local.app.two_servers import ServersInTurn, TwoServers

    servers: ComparedServers
    if isinstance(source.server, EngineServer):
        servers = TwoServers(source.server, str(served.plain_url), drafter)
    else:
        servers = ServersInTurn(source.server.program, source.server.extra, drafter)
    return Compared(replace(source, start=servers.start), servers)
