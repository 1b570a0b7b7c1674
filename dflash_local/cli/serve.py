"""``dflash serve``: one pair kept in memory behind an OpenAI-compatible endpoint on this machine.

The command's options; the server itself is imported when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

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

PORT = 8000


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "serve", serve)


def serve(
    model: opt.Model,
    host: HostOption = HOST,
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = PORT,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    allow_host: AllowHostOption = None,
    keep_alive: KeepAliveOption = "30m",
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    think: opt.Think = None,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Serve a model to OpenAI clients on this machine; Ctrl-C stops it. The token may be in DFLASH_TOKEN."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    address = address_of(host, port, token, token_file, allow_host, call.user)
    seconds = parse_duration(keep_alive)
    pair = call.pair(model, drafter, load)
    with named_when_missing():
        from dflash_local.cli.serving import Serving
    Serving(call, pair, load, call.thinks(pair, think)).run(address, seconds)
