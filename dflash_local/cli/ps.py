"""``dflash ps``: what each running ``dflash serve``, ``dflash web`` and engine's process of this user keeps loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.settings import Settings
from dflash_local.tables import Column, table, tokens

if TYPE_CHECKING:
    from dflash_local.app.process_messages import ProcessStatus
    from dflash_local.app.process_records import ProcessRecord

COLUMNS = (
    Column("MODEL", shrinks=True),
    Column("STATE"),
    Column("LOADED AS"),
    Column("CONTEXT", right=True),
    Column("REQUESTS", right=True),
    Column("CONVERSATIONS", right=True),
    Column("ADDRESS"),
    Column("PROCESS", right=True),
)

EXAMPLES = ("dflash ps", "dflash ps --json")


def ps(as_json: opt.Json = False, debug: opt.Debug = False) -> None:
    """Show what runs here: servers, pages and what holds a model."""
    call = Invocation.begin()
    console, servers = call.console, served(call.user)
    if as_json:
        console.json({"servers": servers})
    elif not servers:
        console.data("Nothing is being served; dflash serve MODEL or dflash web starts it.")
    else:
        console.lines(lines(servers, console.columns))
        if any(server["state"] == "unknown" for server in servers):
            console.note("a server wants a token: put it into DFLASH_TOKEN to see more")


def served(user: Settings) -> list[dict[str, Any]]:
    """The servers and the engine's processes that answer, by what they say of themselves now; the latter have no url.

    The state of a server is ``unknown`` where it wants a token that the user has not given.
    """
    from dflash_local.app.local_process import running_engines
    from dflash_local.app.process_records import read_records

    records = [record for record in read_records(user) if not record.is_engine]
    servers = [found for record in records if (found := _status_of(record, user)) is not None]
    return servers + [_engine(record.owner.pid, status) for record, status in running_engines(user)]


def _engine(pid: int, status: ProcessStatus) -> dict[str, Any]:
    return {
        "model": status.name,
        "state": status.state,
        "url": "",
        "pid": pid,
        "commands": status.commands,
        "held": [asdict(each) for each in status.held],
        "facts": None if status.facts is None else status.facts.as_dict(),
    }


def _status_of(record: ProcessRecord, user: Settings) -> dict[str, Any] | None:
    from dflash_local.remote.serve_status import is_listening, status_of

    url, token = record.address, user.environ.get("DFLASH_TOKEN") if record.token else None
    if not is_listening(url):
        return None
    status = status_of(url, token)
    if status is None and not record.token:
        return None  # another program has its port
    served = status or {}
    facts = served.get("facts")
    return {
        "model": str(served.get("model", record.model)),
        "state": served.get("state", "unknown"),
        "url": url,
        "pid": served.get("pid", record.owner.pid),
        "running": served.get("running"),
        "waiting": served.get("waiting"),
        "held": served.get("held", []),
        "reused_tokens": served.get("reused_tokens"),
        "keep_alive_s": served.get("keep_alive_s"),
        "facts": facts if isinstance(facts, dict) and served["state"] == "ready" else None,
    }


def lines(servers: list[dict[str, Any]], width: int) -> list[str]:
    return table(COLUMNS, [_cells(server) for server in servers], width)


def _cells(server: dict[str, Any]) -> tuple[str, ...]:
    from dflash_local.remote.serve_status import facts_of
    from dflash_local.remote.server_checks import passed_on

    facts = facts_of(server) or passed_on(server)
    running, waiting = server.get("running"), server.get("waiting")
    commands = server.get("commands", 0)
    used = f"{commands} command{'s' if commands > 1 else ''}" if commands else ""
    return (
        server["model"],
        str(server["state"]),
        "" if facts is None else facts.loaded_as,
        "" if facts is None else tokens(facts.context),
        used if running is None else f"{running} running, {waiting} waiting",
        _held(server["held"]),
        server["url"],
        str(server["pid"] or ""),
    )


def _held(counts: list[dict[str, Any]]) -> str:
    """Say how many conversations lie where: ``1 device, 2 disk``."""
    return ", ".join(f"{each['sequences']} {each['place']}" for each in counts if each["sequences"])
