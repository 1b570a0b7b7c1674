"""``dflash serve --engine vllm``: the endpoint over a server that it launches, ends, and launches again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local.cli.ps import lines, served
from dflash_local.settings import load as load_settings
from tests.cli.conftest import Opened, Result
from tests.cli.served import Client
from tests.remote.launched_fake import is_alive, started, wait_until_gone

pytestmark = [
    pytest.mark.usefixtures("opened"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
]
CHAT = "/v1/chat/completions"
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
Serving = Callable[..., Result]


def state(client: Client) -> str:
    return str(client.call("/dflash/v1/status")[1]["state"])


def test_a_request_waits_for_the_launch_and_the_end_ends_it(serving: Serving, opened: Opened, record: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        seen["chat"] = client.call(CHAT, ASKED)
        seen["first"] = started(record)
        seen["ps"] = lines(served(load_settings()), 200)[1]
        seen["unloaded"] = client.call("/dflash/v1/unload", {})[1]["state"]
        seen["gone"] = all(wait_until_gone(seen["first"][name]) for name in ("pid", "child"))
        seen["again"] = client.call(CHAT, ASKED)
        seen["other"] = client.call("/dflash/v1/load", {"model": "demo-hybrid"})

    result = serving(visit, "demo", "--engine", "vllm", "--engine-args", "--max-model-len 1024", "--keep-alive", "2h")
    assert result.code == 0 and not opened.sessions, result.err
    assert seen["chat"][1]["choices"][0]["message"]["content"] == "Hello, world!\n"
    assert seen["first"]["argv"][-2:] == ["--max-model-len", "1024"]
    assert "replies come from vLLM 0.32.0 at http://127.0.0.1:" in result.err
    assert seen["unloaded"] == "unloaded" and seen["gone"] and "vLLM 0.32.0 at http://127.0.0.1:" in seen["ps"]
    assert seen["again"][0] == 200 and started(record)["pid"] != seen["first"]["pid"]
    assert seen["other"][0] == 404 and not is_alive(started(record)["pid"])


def test_one_that_died_is_launched_again_by_the_next_request(serving: Serving, record: Path) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        client.call(CHAT, ASKED)
        first = started(record)["pid"]
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone(first)
        seen["again"] = client.call(CHAT, ASKED)
        seen["state"], seen["fresh"] = state(client), started(record)["pid"] != first

    result = serving(visit, "demo", "--engine", "vllm")
    assert result.code == 0 and seen["again"][0] == 200 and seen["fresh"] and seen["state"] == "ready"
    assert not is_alive(started(record)["pid"])


def test_a_plain_one_serves_without_drafts(serving: Serving, record: Path) -> None:
    seen: list[Any] = []

    def visit(client: Client) -> None:
        seen.append(client.call(CHAT, ASKED)[1]["metrics"])

    assert serving(visit, "demo", "--engine", "vllm", "--mode", "ar").code == 0
    assert seen[0]["dflash"]["mode"] == "ar" and seen[0]["speculative_decoding"] is None
    assert not [word for word in started(record)["argv"] if "speculative" in word]


def test_the_end_breaks_a_launch_off(serving: Serving, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "hangs")

    def visit(client: Client) -> None:
        while not record.exists() or state(client) != "loading":
            time.sleep(0.01)

    result = serving(visit, "demo", "--engine", "vllm")
    assert result.code == 0 and wait_until_gone(started(record)["pid"]) and "Traceback" not in result.err
