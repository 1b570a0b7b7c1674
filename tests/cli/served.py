"""``dflash serve`` and ``dflash web`` run by a test: the command in this very process, and a client that asks it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from dflash_local.app.process_records import ProcessRecord
from dflash_local.store.owner import Owner

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Result


class Client:
    """Asks the server that this very process runs."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.port = urlsplit(record["address"]).port

    def call(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, Any]:
        status, text = self.ask(path, body, headers, timeout)
        return status, json.loads(text)

    def text(self, path: str, body: Any = None) -> str:
        return self.ask(path, body)[1]

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        kind = {"Content-Type": "application/json"} if body is not None else {}
        data = json.dumps(body) if body is not None else None
        connection.request("POST" if body is not None else "GET", path, data, {**kind, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text


def records_of(home: Path) -> list[Path]:
    """What running servers wrote down, each a file."""
    return sorted((home / ".cache" / "dflash-local").glob("serve-*.json"))


def record_by_hand(home: Path, url: str, **owner: Any) -> Path:
    """Write a server down as ``dflash serve`` does, whether there is one or not."""
    path = home / ".cache" / "dflash-local" / "serve-by-hand.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ProcessRecord(replace(Owner.me("serve"), **owner), url).line, encoding="utf-8")
    return path


@pytest.fixture
def serving(cli: Cli, own_home: Path) -> Iterator[Callable[..., Result]]:
    """``serving(visit, "demo", ...)`` runs the command until ``visit(client)`` returns, then sends SIGTERM."""
    yield from _command(cli, own_home, "serve")


@pytest.fixture
def web(cli: Cli, own_home: Path) -> Iterator[Callable[..., Result]]:
    """As ``serving``, of ``dflash web``."""
    yield from _command(cli, own_home, "web")


def _command(cli: Cli, own_home: Path, name: str) -> Iterator[Callable[..., Result]]:
    failures: list[BaseException] = []
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    others = records_of(own_home)

    def start(visit: Callable[[Client], None], *argv: str, by: int = signal.SIGTERM) -> Result:
        ended = threading.Event()

        def outside() -> None:
            try:
                client = _wait_for(own_home, others, ended)
                if client is not None:
                    visit(client)
            except BaseException as error:
                failures.append(error)
            if not ended.is_set():
                os.kill(os.getpid(), by)

        thread = threading.Thread(target=outside, daemon=True)
        thread.start()
        result = cli(name, *argv, "--port", "0")
        ended.set()
        thread.join(60)
        assert not failures, failures[0]
        assert records_of(own_home) == others, "the record outlives the server"
        return result

    yield start
    for number, handler in before.items():  # a signal that came late must not end the tests
        signal.signal(number, handler)


def _wait_for(home: Path, others: list[Path], ended: threading.Event) -> Client | None:
    """A client as soon as the server answers; None when it ended without."""
    while not ended.is_set():
        time.sleep(0.01)
        try:
            (record,) = set(records_of(home)) - set(others)
            client = Client(json.loads(record.read_text(encoding="utf-8")))
            client.call("/health")
        except (OSError, ValueError):
            continue
        return client
    return None
