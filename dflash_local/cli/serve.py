"""``dflash serve``: one pair in memory behind an OpenAI-compatible endpoint; the server is imported when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_local.app.engine_server import sampling_notice
from dflash_local.app.loading import named_when_missing
from dflash_local.cli import address as at
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.server_options import Origin, ServerOptions, origin
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.app.resident_server import ResidentServer


def serve(
    model: opt.ModelOrDefault = None,
    host: at.Host = at.HOST,
    port: at.Port = 8000,
    token: at.Token = None,
    token_file: at.TokenFile = None,
    allow_host: at.AllowHost = None,
    keep_alive: at.KeepAlive = None,
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    think: opt.Think = None,
    *,
    served: ServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Serve a model to OpenAI clients on this machine; Ctrl-C stops it. The token may be in DFLASH_TOKEN."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    address = at.address_of(host, port, token, token_file, allow_host, call.user)
    source = origin(call, model, drafter, load, served)
    seconds = at.keep_alive_of(keep_alive, kept_by=f"the server at {served.url}" if served.url is not None else "")
    pair = source.pair
    with named_when_missing():
        from dflash_local.cli.serving import Serving
    thinks, server = call.thinks(pair, think), elsewhere(call, source, drafter)
    Serving(call, pair, source.load, thinks, server=server).run(address, seconds)


def elsewhere(
    call: Invocation, source: Origin, drafter: str | None, plain_url: str | None = None
) -> ResidentServer | None:
    """The server that replies are to come from, checked; None where the pair is loaded here.

    Raises:
        DFlashError: it will not do.
    """
    if source.server is None:
        return None
    from dflash_local.app.resident_server import resident_server

    if notice := sampling_notice(source.pair, "a request sets a temperature"):
        call.console.note(notice)
    server = resident_server(source.server, drafter, call.user, call.console.notify, plain_url)
    server.check(source.pair)
    return server
