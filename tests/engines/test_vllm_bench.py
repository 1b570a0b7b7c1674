"""``dflash bench --url`` over a real vLLM on the CPU: 1, 4 and 16 requests at a time, and one of others."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_local.app.engine_launch import LaunchedServer
from dflash_local.bench.tasks.server_results import LoopFile, ServerResult
from dflash_local.remote.endpoint import TOKEN_VARIABLE
from tests.cli.conftest import Cli
from tests.engines.test_vllm import NEEDS_VLLM, started

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500), NEEDS_VLLM]
PROMPTS, TOKENS, LEVELS = 32, 96, (1, 4, 16)


def test_every_number_of_requests_has_its_figures(
    cli: Cli, launching: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launched with its drafter, then without."""
    report = tmp_path / "report.json"
    argv = ("bench", "demo", *launching, "--limit", str(PROMPTS), "--max-new-tokens", str(TOKENS))
    done = cli(*argv, "--concurrency", ",".join(map(str, LEVELS)), "--report", str(report))
    assert done.code == 0, done.err
    with capsys.disabled():
        print(f"\n{done.out}")
    tasks = json.loads(report.read_text(encoding="utf-8"))["tasks"]
    assert [task["concurrency"] for task in tasks] == list(LEVELS)
    for task in tasks:
        found = task["dflash"]
        assert (found["prompts"], found["failed"], found["throughput"]["prompts"]) == (PROMPTS, 0, PROMPTS)
        assert found["accepted"]["source"] == "the server's counters" and 1 < found["accepted"]["mean"] <= 8
        assert found["ttft_s"]["p99"] >= found["ttft_s"]["p50"] > 0
        assert task["plain"]["accepted"]["mean"] is None and task["equal"]["of"] == PROMPTS


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchedServer]:
    with started(tmp_path) as server:
        monkeypatch.setenv(TOKEN_VARIABLE, server.token)
        yield server


def test_a_request_of_another_client_is_seen(vllm: LaunchedServer, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LoopFile.add
    others: list[threading.Thread] = []

    def ask() -> None:
        body = json.dumps({"model": "demo", "prompt": "Count", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {vllm.token}"}
        request = urllib.request.Request(f"{vllm.url}/v1/completions", body, headers)
        urllib.request.urlopen(request, timeout=60).read()

    def with_another(file: LoopFile, result: ServerResult) -> None:
        real(file, result)
        if not others:
            others.append(threading.Thread(target=ask))
            others[0].start()

    monkeypatch.setattr(LoopFile, "add", with_another)
    argv = ("bench", "demo", "--url", vllm.url, "--limit", "6", "--max-new-tokens", "32", "--concurrency", "2")
    done = cli(*argv, "--json")
    others[0].join()
    accepted = done.json["tasks"][0]["dflash"]["accepted"]
    assert accepted["mean"] is None and accepted["source"] == "other requests ran at the same time"
