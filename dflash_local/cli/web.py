"""``dflash web``: the page in a browser and the endpoint, one server over one pair.

The command's options; the page and the server are imported when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local import settings
from dflash_local.cli import options as opt
from dflash_local.cli import serve as serving
from dflash_local.cli import session as loading
from dflash_local.cli.chat import ModelOrDemo
from dflash_local.cli.console import Console
from dflash_local.cli.load_options import add_command
from dflash_local.cli.resolve import resolve
from dflash_local.cli.thinking import thinks
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
    model: ModelOrDemo = None,
    host: serving.HostOption = serving.HOST,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = PORT,
    token: serving.TokenOption = None,
    token_file: serving.TokenFileOption = None,
    allow_host: serving.AllowHostOption = None,
    keep_alive: serving.KeepAliveOption = "30m",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    drafter: opt.Drafter = None,
    think: opt.Think = None,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Chat, race, measure and manage models in a browser; the endpoint of ``serve`` is there too. Ctrl-C stops it."""
    user = settings.load()
    console = Console(user.environ)
    address = serving.address_of(host, port, token, token_file, allow_host, user)
    seconds = serving.parse_duration(keep_alive)
    settings.quiet_libraries()
    with loading.named_when_missing("'dflash-local[web]'"):
        from dflash_local.ui.web.page import page as page_of
    pair = resolve(model or user.model or "demo", drafter, user, console, allow_mismatch=load.allow_mismatch)
    with loading.named_when_missing():
        from dflash_local.cli.serving import Serving
        from dflash_local.cli.web_backend import WebBackend

    def page(resident: Resident, url: str, ending: Callable[[], bool]) -> Page:
        return page_of(WebBackend(resident, pair, load, user, url), ending)

    life = Serving(pair, load, thinks(pair, think, user, console), user, console, page=page, open_browser=open_browser)
    life.run(address, seconds)
