"""Schemathesis against ``dflash serve demo``: thousands of requests made of the page that describes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dflash_local.api.openapi import PATH
from tests.clients.conftest import OFFLINE, SCRIPTS, Demo, interpreter

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

REQUESTS = 5_000
EXAMPLES = 320  # of an operation, beside those that cover its schema: 5,000 in all
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def test_no_request_breaks_the_endpoint(demo: Demo, tmp_path: Path) -> None:
    environ = {**OFFLINE, "HOME": str(tmp_path), "PYTHONPATH": str(SCRIPTS), "SCHEMATHESIS_HOOKS": "fuzz_hooks"}
    program = Path(interpreter("schemathesis")).with_name("schemathesis")
    options = ["--phases", "coverage,fuzzing", "-n", str(EXAMPLES), "--checks", CHECKS, "--seed", "1", "--no-shrink"]
    more = ["--continue-on-failure", "--request-timeout", "60"]
    command = [str(program), "run", f"{demo.url}{PATH}", *options, *more]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    statuses = [status for _, status in demo.answered()]
    told = {status: statuses.count(status) for status in sorted(set(statuses))}
    print(f"{len(statuses)} requests: {told}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert max(statuses) < 500 and len(statuses) >= REQUESTS, told
    assert told[200] > REQUESTS // 10, "hardly a request was right"
