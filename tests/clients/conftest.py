"""One ``dflash serve demo`` for the clients, and the environments they run in."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import served
from tests.ui.web.conftest import profile, visitor  # noqa: F401  (the browser of the page's own tests)

FOLDER = Path(__file__).resolve().parents[2] / ".venv-clients"
SCRIPTS = Path(__file__).with_name("scripts")
CLIENT_S = 300.0
IDLE_S = 30.0
# No client may ask the internet for anything; whatever this process has in its environment stays out.
OFFLINE = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "true",
    "SCARF_NO_ANALYTICS": "true",
    "ANONYMIZED_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "none",
}
_CANCELLED = re.compile(r'request_success_total\{.*finished_reason="cancelled"[^}]*\} (\d+)')
_ACCESS = re.compile(r" info (?:GET|POST) (\S+) (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Demo:
    """The server under test. ``url``: its address without a path."""

    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def said(self, *messages: dict[str, str]) -> str:
        """What the target alone answers, greedy."""
        body = {"model": "demo", "messages": messages, "temperature": 0, "mode": "ar"}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    @property
    def cancelled(self) -> int:
        """Replies that were stopped so far."""
        found = _CANCELLED.search(self.get("/metrics"))
        return int(found[1]) if found else 0

    def wait_idle(self) -> None:
        """Until nothing runs and nothing waits; the replies of clients that left end within a cycle."""
        until = time.monotonic() + IDLE_S
        while (health := json.loads(self.get("/health")))["running"] or health["waiting"]:
            assert time.monotonic() < until, f"the server is still at work: {health}"
            time.sleep(0.05)

    def answered(self) -> list[tuple[str, int]]:
        """Path and status of every request so far, as the server logged them."""
        return [(path, int(status)) for path, status in _ACCESS.findall(self.log.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A server of its own for the tests of one file."""
    log = tmp_path_factory.mktemp("served") / "log.txt"
    with served("demo", log=log) as url:
        yield Demo(url, log)


def interpreter(name: str) -> str:
    """The Python of a client's environment."""
    python = FOLDER / name / "bin" / "python"
    assert python.exists(), f"{python} is missing: run make test-clients"
    return str(python)


def run_script(name: str, home: Path, arguments: Sequence[str], kind: str = "with") -> dict[str, Any]:
    """What a client's script reports."""
    environ = {**OFFLINE, "HOME": str(home), "LLM_USER_PATH": str(home)}
    command = [interpreter(name), str(SCRIPTS / f"{kind}_{name}.py"), *arguments]
    done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=CLIENT_S)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))
