"""``dflash ps``: what a running server keeps loaded, what it will not tell, and a record that is stale."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.cli.ps import lines, served
from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import Client

NOTHING = "Nothing is being served; dflash serve MODEL or dflash web starts it.\n"


def test_without_a_server_there_is_nothing(cli: Cli) -> None:
    assert cli("ps").out == NOTHING and cli("ps", "--json").json == {"servers": []}


def test_a_server_says_what_it_keeps(serving: Callable[..., Result], cli: Cli, opened: Opened, own_home: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        client.call("/dflash/v1/load", {"model": "demo"})
        seen["server"] = served(settings.load())
        client.call("/dflash/v1/unload", {})
        seen["empty"] = served(settings.load())
        seen["record"] = client.record

    assert serving(visit, "demo", "--keep-alive", "1h").code == 0
    assert seen["empty"]["state"] == "unloaded" and seen["empty"]["facts"] is None
    server = seen["server"]
    assert (server["model"], server["state"], server["pid"]) == ("demo", "ready", os.getpid())
    assert (server["running"], server["waiting"], server["keep_alive_s"]) == (0, 0, 3600.0)
    assert server["facts"]["context"] == 512 and json.dumps(server)
    titles, row = lines(server, 200)
    assert titles.split() == ["MODEL", "STATE", "LOADED", "AS", "CONTEXT", "REQUESTS", "ADDRESS", "PROCESS"]
    assert row.split()[:6] == ["demo", "ready", "reference", "float32", "cpu", "512"] and server["url"] in row
    record = own_home / ".cache" / "dflash-local" / "serve.json"
    record.write_text(json.dumps(seen["record"]), encoding="utf-8")  # it was killed: nobody took the record away
    assert cli("ps").out == NOTHING


def test_a_server_with_a_token_is_named_to_those_who_lack_it(
    serving: Callable[..., Result], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any] | None] = []

    def visit(_client: Client) -> None:
        seen.append(served(settings.load()))
        monkeypatch.setenv("DFLASH_TOKEN", "a-secret-of-mine")
        seen.append(served(settings.load()))

    assert serving(visit, "demo", "--token", "a-secret-of-mine").code == 0
    hidden, shown = seen
    assert hidden is not None and hidden["state"] == "unknown" and hidden["model"] == "demo"
    assert shown is not None and shown["state"] in ("loading", "ready") and "a-secret" not in json.dumps(shown)
