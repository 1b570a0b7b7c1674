"""``dflash stop``: ends what ``dflash ps`` shows."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from dflash_local.app.models import registry
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.ps import served
from dflash_local.errors import UsageError
from dflash_local.settings import Settings

WHICH = "The model or the address of what dflash ps shows."

EXAMPLES = ("dflash stop 8000", "dflash stop --all")


def stop(
    which: Annotated[str | None, typer.Argument(metavar="[MODEL|ADDRESS]", help=WHICH)] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all of them.")] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Stop what dflash ps shows, and wait until its memory is free."""
    from dflash_local.app.local_process import stop_engine
    from dflash_local.app.process_records import read_records, stop_server

    call = Invocation.begin()
    user, console = call.user, call.console
    if (which is None) != every:
        raise UsageError("give the MODEL or ADDRESS to stop, or --all", "dflash ps shows them")
    records = {(record.owner.pid if record.is_engine else record.address): record for record in read_records(user)}
    found = [one for one in served(user) if which is None or _is_meant(one, which, user)]
    if which is not None and not found:
        raise UsageError(f"no running server has {which!r}", "dflash ps shows what runs")
    stopped: list[dict[str, Any]] = []
    for one in found:
        begin = time.monotonic()
        console.show_progress(f"stopping {one['model']}")
        record = records[one["url"] or one["pid"]]
        stop_engine(record) if record.is_engine else stop_server(record)
        stopped.append({**{name: one[name] for name in ("model", "url", "pid")}, "seconds": time.monotonic() - begin})
        if not as_json:
            where = one["url"] or f"process {one['pid']}"
            console.data(f"stopped {one['model']} at {where} in {stopped[-1]['seconds']:.1f} s")
    if as_json:
        console.json({"stopped": stopped})
    elif not found:
        console.data("Nothing is being served.")


def _is_meant(server: dict[str, Any], which: str, user: Settings) -> bool:
    """True where ``which`` is a name of the server's model, or its address with or without http://."""
    row = registry(user).find(which)
    names = {which.strip().casefold(), *([row.name.casefold()] if row else [])}
    url = server["url"]
    return not names.isdisjoint({server["model"].casefold(), url, url.partition("://")[2]} - {""})
