"""``dflash stop``: servers end by model, address or all at once, and no other process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_local.app import process_records
from dflash_local.app.process_records import ProcessRecord, stop_server
from dflash_local.store.owner import Owner, started
from tests.cli.conftest import Cli
from tests.cli.served import records_of

Start = Callable[[str], dict[str, Any]]


@pytest.fixture
def start(own_home: Path) -> Iterator[Start]:
    """``start("demo")`` runs a server of its own process and gives what it wrote down."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(model: str) -> dict[str, Any]:
        before = set(records_of(own_home))
        words = ["serve", model, "--port", "0", "--keep-alive", "0", "--engine", "fused"]
        running.append(subprocess.Popen([sys.executable, "-m", "dflash_local", *words], stderr=subprocess.DEVNULL))
        while not (new := set(records_of(own_home)) - before):
            assert running[-1].poll() is None
            time.sleep(0.05)
        record: dict[str, Any] = json.loads(new.pop().read_text(encoding="utf-8"))
        return record

    yield begin
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.needs_torch
def test_servers_end_by_model_by_address_and_all_at_once(cli: Cli, start: Start, own_home: Path) -> None:
    first, second, third = start("demo"), start("demo-hybrid"), start("demo-hybrid")
    done = cli("stop", "DEMO")
    assert (
        done.code == 0 and done.out.startswith(f"stopped demo at {first['address']} in ") and done.out.count("\n") == 1
    )
    assert psutil.Process(first["owner"]["pid"]).status() == psutil.STATUS_ZOMBIE, (
        "it is gone, but for its parent, this test"
    )
    (other,) = cli("stop", second["address"].partition("://")[2], "--json").json["stopped"]
    assert (other["model"], other["pid"]) == ("demo-hybrid", second["owner"]["pid"])
    assert cli("stop", "--all").out.startswith(f"stopped demo-hybrid at {third['address']} in ")
    assert records_of(own_home) == [] and cli("stop", "--all").out == "Nothing is being served.\n"


def test_what_does_not_run_and_what_is_not_said_are_errors(cli: Cli) -> None:
    unknown = cli("stop", "demo")
    assert unknown.code == 2 and unknown.err == "error: no running server has 'demo'\nhint: dflash ps shows what runs\n"
    for words in ((), ("demo", "--all")):
        assert cli("stop", *words).err.startswith("error: give the MODEL or ADDRESS to stop, or --all")


def sleeper(words: str = "pass") -> subprocess.Popen[bytes]:
    program = f"import signal, time; {words}; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    return process


def record_of(pid: int, started_at: Any) -> ProcessRecord:
    return ProcessRecord(replace(Owner.me("serve"), pid=pid, started=started_at), "http://127.0.0.1:1")


def test_a_process_that_took_the_number_of_a_server_is_left_alone() -> None:
    other = sleeper()
    stop_server(record_of(other.pid, started_at=(started(os.getppid()) or 0.0) - 3600))
    assert other.poll() is None
    other.kill()
    other.wait()
    stop_server(record_of(other.pid, started_at=(started(os.getppid()) or 0.0) - 3600))  # nobody has it


@pytest.mark.skipif(sys.platform == "win32", reason="signals as on POSIX")
def test_a_server_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_records, "STOP_S", 0.3)
    deaf = sleeper("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    stop_server(record_of(deaf.pid, started_at=started(deaf.pid)))
    assert deaf.wait(10) == -9
