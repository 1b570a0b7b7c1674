"""Our endpoint over a real vLLM of the demo pair on the CPU, which the command launches."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from dflash_local.cli.ps import lines, served
from dflash_local.settings import load as load_settings
from tests.cli.conftest import Result
from tests.cli.served import Client, serving  # noqa: F401  # a fixture
from tests.engines.test_vllm import NEEDS_VLLM

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500), NEEDS_VLLM]
CHAT = "/v1/chat/completions"
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 7."}], "temperature": 0}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def wait_for(client: Client, *states: str) -> dict[str, Any]:
    """The status once it is one of these."""
    while True:
        status: dict[str, Any] = client.call("/dflash/v1/status")[1]
        if status["state"] in states:
            return status
        time.sleep(0.2)


def test_the_endpoint_over_it(
    serving: Callable[..., Result],  # noqa: F811
    launching: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        seen["loaded"] = wait_for(client, "ready", "broken")
        seen["chat"] = client.call(CHAT, ASKED)
        seen["text"] = client.call("/v1/completions", {"model": "demo", "prompt": "Count", "max_tokens": 8})
        seen["tools"] = client.call(CHAT, {**ASKED, "tools": [TOOL]})
        seen["plain"] = client.call(CHAT, {**ASKED, "logprobs": True})
        seen["metrics"] = client.text("/metrics")
        seen["ps"] = lines(served(load_settings()), 200)[1]
        url = seen["loaded"]["facts"]["url"]
        os.kill(_listener(int(url.rpartition(":")[2])), signal.SIGKILL)
        seen["again"] = client.call(CHAT, ASKED, timeout=600)  # which launches another one

    result = serving(visit, "demo", *launching)
    assert result.code == 0, result.err
    status, chat = seen["chat"]
    assert status == 200 and chat["choices"][0]["message"]["content"].strip() == "3, 4, 5, 6, 7"
    drafted = chat["metrics"]["speculative_decoding"]
    assert drafted["mean_acceptance_length"] > 2 and drafted["num_spec_tokens"] == 7
    assert chat["metrics"]["dflash"]["engine"] == "vllm" and "verify_ms" not in chat["metrics"]["dflash"]
    assert seen["text"][0] == 200 and seen["text"][1]["usage"]["completion_tokens"] == 8
    assert seen["tools"][0] == 400 and "tool" in seen["tools"][1]["error"]["message"]
    assert seen["plain"][0] == 400 and "without drafts only" in seen["plain"][1]["error"]["message"]
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"}' in seen["metrics"]
    assert "vLLM 0.32.0" in seen["ps"] and "7 drafts a cycle" in seen["ps"]
    assert seen["again"][1]["choices"][0]["message"]["content"].strip() == "3, 4, 5, 6, 7"
    with capsys.disabled():
        print(f"\n{seen['ps']}\n{drafted}\n{seen['tools'][1]['error']['message']}")


def _listener(port: int) -> int:
    """The process that listens at a port of this machine."""
    return next(one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid)
