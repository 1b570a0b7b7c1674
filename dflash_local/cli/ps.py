"""``dflash ps``: what a running ``dflash serve`` or ``dflash web`` of this user keeps loaded."""

from __future__ import annotations

from typing import Any

from dflash_local.app.attaching import running_server
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.settings import Settings
from dflash_local.tables import Column, table, tokens

COLUMNS = (
    Column("MODEL", shrinks=True),
    Column("STATE"),
    Column("LOADED AS"),
    Column("CONTEXT", right=True),
    Column("REQUESTS", right=True),
    Column("ADDRESS"),
    Column("PROCESS", right=True),
)


def ps(as_json: opt.Json = False, debug: opt.Debug = False) -> None:
    """Show what a running dflash serve or dflash web keeps loaded on this machine."""
    call = Invocation.begin()
    console, server = call.console, served(call.user)
    if as_json:
        console.json({"servers": [] if server is None else [server]})
    elif server is None:
        console.data("Nothing is being served; dflash serve MODEL or dflash web starts it.")
    else:
        console.lines(lines(server, console.columns))
        if server["state"] == "unknown":
            console.note("it wants a token: put it into DFLASH_TOKEN to see more")


def served(user: Settings) -> dict[str, Any] | None:
    """The server that wrote itself down, by what it says of itself now; None when nobody answers there.

    Its state is ``unknown`` where it wants a token that the user has not given.
    """
    record = running_server(user)
    if record is None:
        return None
    from dflash_local.remote.attached import Server, is_listening

    url, token = str(record["url"]), user.environ.get("DFLASH_TOKEN") if record.get("token") else None
    if not is_listening(url):
        return None
    status = Server(url, token).status()
    if status is None and not record.get("token"):
        return None  # another program has its port
    served = status or {}
    facts = served.get("facts")
    return {
        "model": str(served.get("model", record.get("model"))),
        "state": served.get("state", "unknown"),
        "url": url,
        "pid": served.get("pid", record.get("pid")),
        "running": served.get("running"),
        "waiting": served.get("waiting"),
        "keep_alive_s": served.get("keep_alive_s"),
        "facts": facts if isinstance(facts, dict) and served["state"] == "ready" else None,
    }


def lines(server: dict[str, Any], width: int) -> list[str]:
    from dflash_local.remote.attached import facts_of
    from dflash_local.remote.server_checks import passed_on

    facts = facts_of(server) or passed_on(server)
    running, waiting = server["running"], server["waiting"]
    cells = (
        server["model"],
        str(server["state"]),
        "" if facts is None else facts.loaded_as,
        "" if facts is None else tokens(facts.context),
        "" if running is None else f"{running} running, {waiting} waiting",
        server["url"],
        str(server["pid"] or ""),
    )
    return table(COLUMNS, [cells], width)
