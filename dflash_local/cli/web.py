"""``dflash web``: the page in a browser and the endpoint, one server over one pair.

The command's options; the page and the server are imported when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local import settings
from dflash_local.app.loading import named_when_missing
from dflash_local.cli import options as opt
from dflash_local.cli.address import (
    HOST,
    AllowHostOption,
    HostOption,
    KeepAliveOption,
    TokenFileOption,
    TokenOption,
    address_of,
    parse_duration,
)
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_local.service.resident import Resident
    from dflash_local.ui.web.mount import Page

PORT = 7860


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "web", web)


def web(
    model: opt.ModelOrDemo = None,
    host: HostOption = HOST,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = PORT,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    allow_host: AllowHostOption = None,
    keep_alive: KeepAliveOption = "30m",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    drafter: opt.Drafter = None,
    think: opt.Think = None,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Chat, race, measure and manage models in a browser; the endpoint of ``serve`` is there too. Ctrl-C stops it."""
    call = Invocation.begin()
    user = call.user
    address = address_of(host, port, token, token_file, allow_host, user)
    seconds = parse_duration(keep_alive)
    settings.quiet_libraries()
    with named_when_missing():
        from dflash_local.ui.web.page import page as page_of
    pair = call.pair(model or user.model or "demo", drafter, load)
    with named_when_missing():
        from dflash_local.app.served_pair import ServedPair
        from dflash_local.cli.serving import Serving

    def page(resident: Resident, url: str, ending: Callable[[], bool]) -> Page:
        return page_of(ServedPair(resident, pair, load, user, url), ending)

    Serving(call, pair, load, call.thinks(pair, think), page, open_browser).run(address, seconds)
