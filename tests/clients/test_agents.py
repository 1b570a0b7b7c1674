"""Real coding agents do a task against ``dflash serve`` over a scripted model: calls of tools change a file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import CLIENT_S, FOLDER, OFFLINE, interpreter, run_script
from tests.clients.environments import NPM
from tests.clients.scripted_agent import AFTER, BEFORE, CALLS, DONE, FILE, TASK
from tests.serve_process import served

pytestmark = pytest.mark.clients

ROOT = Path(__file__).resolve().parents[2]
# What makes each do a task without a person, around the arguments that ``--run`` gives it.
COMMANDS = {
    "claude": ("", '--print --verbose --output-format stream-json --allowedTools "Bash Read Edit" --'),
    "codex": ("exec", "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"),
    "opencode": ("run", "--format json"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the task is done."""
    made = tmp_path / "work"
    made.mkdir()
    (made / FILE).write_text(f"{BEFORE}\nsize: 3\n", encoding="utf-8")
    return made


def variables(home: Path, *programs: Path) -> dict[str, str]:
    path = os.pathsep.join([*map(str, programs), OFFLINE["PATH"]])
    return {**OFFLINE, "PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT)}


def requests(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_agent_that_is_run_does_a_task_of_three_calls(name: str, folder: Path, tmp_path: Path) -> None:
    program = FOLDER / NPM / "node_modules" / ".bin" / name
    node = shutil.which("node")
    assert program.exists() and node is not None, f"{program} is missing: run make test-clients"
    before, behind = COMMANDS[name]
    start = tmp_path / "programs" / name
    start.parent.mkdir()
    line = f'exec {program} {before} "$@" {behind} {shlex.quote(TASK)} </dev/null'
    start.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    start.chmod(0o755)
    log = tmp_path / "requests.jsonl"
    words = [sys.executable, "-m", "tests.clients.scripted_agent", str(log), "serve", "demo", "--port", "0"]
    environ = variables(tmp_path, start.parent, Path(node).parent)
    command = [*words, "--for", name, "--run"]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=CLIENT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert DONE in done.stdout and (folder / FILE).read_text(encoding="utf-8") == f"{AFTER}\nsize: 3\n"
    turns = [one for one in requests(log) if one["tools"]]
    assert turns[-1]["said"] == DONE and str(turns[-1]["roles"]).endswith("at" * CALLS)
    assert all(one["extends"] for one in turns), "a turn's prefix is not in the caches"


def test_aider_edits_by_text(folder: Path, tmp_path: Path) -> None:
    options = "--model openai/demo --yes-always --no-git --no-show-model-warnings --no-check-update --analytics-disable"
    log = tmp_path / "requests.jsonl"
    with served("demo", program=("tests.clients.scripted_agent", str(log))) as url:
        aider = Path(interpreter("aider")).with_name("aider")
        command = [str(aider), *options.split(), "--edit-format", "diff", "--message", TASK, FILE]
        environ = {**variables(tmp_path), "OPENAI_API_BASE": f"{url}/v1"}
        done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=CLIENT_S)
    assert (folder / FILE).read_text(encoding="utf-8") == f"{AFTER}\nsize: 3\n", done.stdout[-3000:]


@pytest.mark.parametrize("library", ["openai", "anthropic"])
def test_a_library_does_the_task_in_every_way_that_it_has(library: str, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with served("demo", program=("tests.clients.scripted_agent", str(log))) as url:
        found = run_script(library, tmp_path, [url, str(folder / FILE), TASK], "task")
    failed = {name: one["failed"] for name, one in found.items() if isinstance(one, dict)}
    assert not failed, "\n".join(failed.values())
    assert found.pop("types") > 10
    assert found == dict.fromkeys(found, [CALLS, DONE, f"{AFTER}\nsize: 3\n"])
