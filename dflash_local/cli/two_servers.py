"""``--url`` with ``--plain-url``: a comparison over two running servers, or of a pair that is loaded here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_local.app.engine_server import EngineServer
from dflash_local.app.two_servers import HOW, TwoServers
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.server_options import EXAMPLE, EngineChoice, Origin, origin
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig


@dataclass(frozen=True, slots=True)
class Compared:
    """Where the replies of a comparison come from.

    Attributes:
        servers: None for a pair that is loaded here.
    """

    origin: Origin
    servers: TwoServers | None = None


def compared(
    call: Invocation,
    model: str | None,
    drafter: str | None,
    load: LoadConfig,
    engine: EngineChoice | None,
    urls: tuple[str | None, str | None],
    default: str | None = None,
) -> Compared:
    """What the options mean; see ``server_options.origin``.

    Args:
        urls: of ``--url`` and ``--plain-url``.

    Raises:
        UsageError: one of them without the other, or see ``origin``. DFlashError: no such pair.
    """
    url, plain_url = urls
    if url is None and plain_url is not None:
        raise UsageError("--plain-url is the second of two servers: --url is missing", f"--url {EXAMPLE}")
    if url is not None and plain_url is None:
        raise UsageError("a server drafts for every request: plain replies need a second one", HOW)
    source = origin(call, model, drafter, load, engine, url, default)
    if not isinstance(source.server, EngineServer) or plain_url is None:
        return Compared(source)
    servers = TwoServers(source.server, plain_url, drafter)
    return Compared(replace(source, start=servers.start), servers)
