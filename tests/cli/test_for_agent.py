"""``dflash serve --for``: settings printed, written, or given to an agent that is run; the agents are scripts."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_local.app.agents import AGENTS, Served
from dflash_local.cli.for_agent import ForAgent
from dflash_local.errors import CheckpointError
from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import records_of

TOKEN = "a-secret-of-mine"
Agent = Callable[..., Path]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """``agent("codex", "lines of Python")`` installs one; what it was started with lies at the path that it gives."""

    def install(name: str, lines: str = "") -> Path:
        told, program = tmp_path / "told.json", tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys, time\n"
            f"json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open({str(told)!r}, 'w'))\n{lines}\n",
            encoding="utf-8",
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return told

    return install


def ended(cli: Cli, *argv: str) -> Result:
    """Run the command to its own end: an agent's end is the server's."""
    return cli("serve", "demo", "--port", "0", *argv)


def test_settings_are_printed_with_what_is_loaded(
    serving: Callable[..., Result], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, ready = threading.Event(), ForAgent.ready

    def told_when_ready(self: ForAgent, served: Served) -> bool:
        ran = ready(self, served)
        printed.set()
        return ran

    monkeypatch.setattr(ForAgent, "ready", told_when_ready)
    result = serving(lambda _client: printed.wait(60), "demo", "--for", "opencode")
    told = json.loads(result.out)["provider"]["dflash"]
    assert told["models"]["demo"]["limit"]["context"] == 512 and told["options"]["baseURL"].endswith("/v1")
    assert "opencode" in result.err and "--write" in result.err


def test_a_file_is_written_and_what_it_held_stays(
    serving: Callable[..., Result], opened: Opened, own_home: Path
) -> None:
    file = own_home / ".codex" / "dflash.config.toml"
    others = own_home / ".codex" / "config.toml"
    others.parent.mkdir()
    others.write_text("model = 'mine'\n", encoding="utf-8")
    for round_ in range(2):
        if round_:
            file.write_text("# my own\n", encoding="utf-8")
        result = serving(lambda _client: _until(lambda: "wire_api" in _text(file)), "demo", "--for", "codex", "--write")
        assert result.code == 0 and result.out == "" and "codex --profile dflash" in result.err
    assert _text(file.with_name("dflash.config.toml.old")) == "# my own\n"
    assert others.read_text(encoding="utf-8") == "model = 'mine'\n", "the user's own is left alone"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_runs_here_and_its_end_is_the_servers(
    cli: Cli, opened: Opened, agent: Agent, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_home: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_TOKEN", TOKEN)
    monkeypatch.setenv("OTHER_API_KEY", "of another service")
    told = agent(name, "sys.exit(3)")
    result = ended(cli, "--for", name, "--run")
    assert result.code == 3 and opened.session.closed and not records_of(own_home)
    arguments, variables, folder = json.loads(told.read_text(encoding="utf-8"))
    assert Path(folder) == tmp_path and variables["DFLASH_TOKEN"] == TOKEN and "OTHER_API_KEY" not in variables
    assert "http://127.0.0.1:" in " ".join([*arguments, variables.get("OPENCODE_CONFIG_CONTENT", "")])
    assert TOKEN not in " ".join(arguments) + result.out + result.err


def test_ctrl_c_is_the_agents(cli: Cli, opened: Opened, agent: Agent, tmp_path: Path) -> None:
    """Pressed, it reaches both: the agent goes on until it ends by itself."""
    pressed = tmp_path / "pressed"
    told = agent("claude", f"while not os.path.exists({str(pressed)!r}): time.sleep(0.01)\nsys.exit(5)")

    def press() -> None:
        _until(told.exists)
        os.kill(os.getpid(), signal.SIGINT)
        pressed.touch()

    before = signal.signal(signal.SIGINT, lambda *_: None)
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    assert ended(cli, "--for", "claude", "--run").code == 5
    thread.join()
    signal.signal(signal.SIGINT, before)


def test_the_end_of_the_server_ends_the_agent(serving: Callable[..., Result], opened: Opened, agent: Agent) -> None:
    told = agent("codex", "time.sleep(600)")
    assert serving(lambda _client: _until(told.exists), "demo", "--for", "codex", "--run").code == 0


def test_an_agent_is_not_started_where_the_model_does_not_load(cli: Cli, opened: Opened, agent: Agent) -> None:
    def refuse(_pair: object) -> None:
        raise CheckpointError("a damaged file")

    told, opened.make = agent("claude"), refuse  # type: ignore[assignment]
    result = ended(cli, "--for", "claude", "--run")
    assert result.code == 6 and "a damaged file" in result.err and not told.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--run",), "--for claude or codex or opencode"),
        (("--write",), "--write of which agent?"),
        (("--for", "codex", "--write", "--run"), "leave one of them out"),
        (("--for", "codex", "--run"), "npm install -g @openai/codex"),
        (("--for", "emacs"), "claude"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    cli: Cli, opened: Opened, argv: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = ended(cli, *argv)
    assert result.code == 2 and says in result.err and not opened.sessions


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
