"""``dflash bench --url`` over a real vLLM on the CPU: 1, 4 and 16 requests at a time, and one of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.engines.test_vllm import NEEDS_VLLM

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
