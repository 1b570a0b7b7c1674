"""``dflash ps``: what a running server keeps loaded, what it will not tell, and a record that is stale."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app.process_records import recorded
from dflash_local.catalog.bundled import find
from dflash_local.cli.ps import lines, served
from dflash_local.store.owner import Owner
from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import Client, record_by_hand
from tests.service.scripted import ScriptedFacts, ScriptedSession

ENDS = "ADDRESS", "PROCESS"
NOTHING = "Nothing is being served; dflash serve MODEL or dflash web starts it.\n"


def test_without_a_server_there_is_nothing(cli: Cli) -> None:
    assert cli("ps").out == NOTHING and cli("ps", "--json").json == {"servers": []}


@pytest.mark.parametrize(
    "record",
    [
        "[]",
        "[" * 100_000,
        '{"owner": {}, "address": "http://127.0.0.1:1"}',
        json.dumps({"owner": asdict(Owner.me("serve")), "address": 7}),
        json.dumps({"owner": asdict(Owner.me("serve")), "address": "http://[x"}),
        json.dumps({"owner": asdict(Owner.me("serve")), "address": "http://h:99999"}),
    ],
)
def test_a_record_that_is_none_is_no_server(cli: Cli, own_home: Path, record: str) -> None:
    file = own_home / ".cache" / "dflash-local" / "serve-1-other.json"
    file.parent.mkdir(parents=True)
    file.write_text(record, encoding="utf-8")
    assert cli("ps").out == NOTHING


def test_a_server_says_what_it_keeps(serving: Callable[..., Result], cli: Cli, opened: Opened, own_home: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        client.call("/dflash/v1/load", {"model": "demo"})
        (seen["server"],) = served(settings.load())
        client.call("/dflash/v1/unload", {})
        (seen["empty"],) = served(settings.load())
        seen["record"] = client.record

    assert serving(visit, "demo", "--keep-alive", "1h").code == 0
    assert seen["empty"]["state"] == "unloaded" and seen["empty"]["facts"] is None
    server = seen["server"]
    assert (server["model"], server["state"], server["pid"]) == ("demo", "ready", os.getpid())
    assert (server["running"], server["waiting"], server["keep_alive_s"]) == (0, 0, 3600.0)
    assert server["facts"]["context"] == 512 and json.dumps(server)
    titles, row = lines([server], 200)
    assert titles.split() == ["MODEL", "STATE", "LOADED", "AS", "CONTEXT", "REQUESTS", "CONVERSATIONS", *ENDS]
    assert "1 device, 2 host" in row and server["held"][1]["bytes"] == 4000 and server["reused_tokens"] == 0
    assert seen["empty"]["held"] == []
    assert row.split()[:6] == ["demo", "ready", "reference", "float32", "cpu", "512"] and server["url"] in row
    stale = record_by_hand(own_home, seen["record"]["address"], pid=2**22 + 1)  # it was killed: the record is left
    assert cli("ps").out == NOTHING
    assert serving(lambda _client: seen.update(stale=stale.exists()), "demo").code == 0 and not seen["stale"]


def test_two_servers_are_both_shown(serving: Callable[..., Result], cli: Cli, opened: Opened) -> None:
    from tests.api.conftest import _start, _stop

    opened.make = lambda pair: ScriptedSession(ScriptedFacts(target=pair.name, drafter=f"{pair.name} (bundled)"))
    other = _start(opened.make(find("demo-hybrid")), model=lambda model: replace(model, name="demo-hybrid"))
    url, seen = f"http://127.0.0.1:{other.port}", dict[str, Any]()

    def visit(_client: Client) -> None:
        user = settings.load()
        with recorded(user, url, "demo-hybrid"):
            seen["ps"] = cli("ps", "--json").json["servers"]
            seen["table"] = cli("ps").out.splitlines()

    assert serving(visit, "demo").code == 0
    assert sorted(server["model"] for server in seen["ps"]) == ["demo", "demo-hybrid"]
    assert len(seen["table"]) == 3 and any(url in line for line in seen["table"])
    _stop(other)


def test_a_server_with_a_token_is_named_to_those_who_lack_it(
    serving: Callable[..., Result], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def visit(_client: Client) -> None:
        seen.extend(served(settings.load()))
        monkeypatch.setenv("DFLASH_TOKEN", "a-secret-of-mine")
        seen.extend(served(settings.load()))

    assert serving(visit, "demo", "--token", "a-secret-of-mine").code == 0
    hidden, shown = seen
    assert hidden["state"] == "unknown" and hidden["model"] == "demo"
    assert shown["state"] in ("loading", "ready") and "a-secret" not in json.dumps(shown)
