"""``dflash serve``: one pair in memory behind an OpenAI-compatible endpoint; the server is imported when it runs."""

from __future__ import annotations

from dataclasses import replace

import typer

from dflash_local.app.loading import named_when_missing
from dflash_local.app.server_pairs import sampling_notice
from dflash_local.cli import address as at
from dflash_local.cli import options as opt
from dflash_local.cli.for_agent import AgentOptions
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.server_options import Origin, ServerOptions, origin
from dflash_local.load_config import LoadConfig

EXAMPLES = ("dflash serve Qwen/Qwen3.5-9B --port 8000", "dflash serve Qwen/Qwen3.5-9B --for claude --run")


def serve(
    model: opt.ModelOrDefault = None,
    host: at.Host = at.HOST,
    port: at.Port = 8000,
    token: at.Token = None,
    token_file: at.TokenFile = None,
    allow_host: at.AllowHost = None,
    allow_origin: at.AllowOrigin = None,
    keep_alive: at.KeepAlive = None,
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    think: opt.Think = None,
    *,
    served: ServerOptions,
    agents: AgentOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Serve a model to OpenAI clients on this machine; Ctrl-C stops it. The token may be in DFLASH_TOKEN."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    address = at.address_of(host, port, token, token_file, allow_host, call.user)
    address = replace(address, origins=at.origins_of(allow_origin))
    source = origin(call, model, drafter, load, served, endpoint=True)
    seconds = at.keep_alive_of(keep_alive, kept_by=f"the server at {served.url}" if served.url is not None else "")
    agent = agents.agent(call)
    with named_when_missing():
        from dflash_local.cli.serving import Serving
    code = Serving(call, checked(call, source), call.thinks(source.pair, think), agent=agent).run(address, seconds)
    if code:
        raise typer.Exit(code)


def checked(call: Invocation, source: Origin) -> Origin:
    """Return the origin, made for an endpoint, after a look at the server that replies are to come from.

    Raises:
        DFlashError: it will not do.
    """
    if source.models.label and (notice := sampling_notice(source.pair, "a request sets a temperature")):
        call.console.note(notice)
    source.models.check(source.pair)
    return source
