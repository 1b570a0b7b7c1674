"""``dflash web``: the endpoint of ``dflash serve`` with a page; both are imported when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local import settings
from dflash_local.app.loading import named_when_missing
from dflash_local.cli import address as at
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.serve import checked
from dflash_local.cli.server_options import TwoServerOptions, origin
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_local.service.service import Service
    from dflash_local.ui.web.mount import Page

EXAMPLES = ("dflash web --open", "dflash web Qwen/Qwen3.5-9B --port 7860")


def web(
    model: opt.ModelOrDefault = None,
    host: at.Host = at.HOST,
    port: at.Port = 7860,
    token: at.Token = None,
    token_file: at.TokenFile = None,
    allow_host: at.AllowHost = None,
    keep_alive: at.KeepAlive = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
    drafter: opt.Drafter = None,
    think: opt.Think = None,
    *,
    served: TwoServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Chat, race, measure and manage models in a browser. The endpoint of ``serve`` is there too. Ctrl-C stops it."""
    call = Invocation.begin()
    user = call.user
    address = at.address_of(host, port, token, token_file, allow_host, user)
    served.check()
    settings.quiet_libraries()
    settings.keep_gradio_private()
    with named_when_missing():
        from dflash_local.ui.web.page import page as page_of
    source = origin(call, model, drafter, load, served, endpoint=True)
    seconds = at.keep_alive_of(keep_alive, kept_by=f"the server at {served.url}" if served.url is not None else "")
    with named_when_missing():
        from dflash_local.app.served_pair import ServedPair
        from dflash_local.cli.serving import Serving
    thinks, source = call.thinks(source.pair, think), checked(call, source)

    def page(service: Service, url: str, ending: Callable[[], bool]) -> Page:
        return page_of(ServedPair(service, source.models, source.load, user, url), ending)

    Serving(call, source, thinks, page, open_browser).run(address, seconds)
