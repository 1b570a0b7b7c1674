"""The command line in-process: a scripted session behind it, toys that are empty folders."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from dflash_local.app import loading
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.console import Console
from dflash_local.cli.main import main
from dflash_local.load_config import LoadConfig
from tests.cli.served import serving, web  # noqa: F401  # fixtures
from tests.fake_hub import FakeHub, online
from tests.remote.launched_fake import fake_program
from tests.service.scripted import ScriptedSession


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.out)
        assert isinstance(content, dict)
        return content


Cli = Callable[..., Result]


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


class NoTerminal(io.TextIOWrapper):
    """Piped input."""


class TypedInput(NoTerminal):
    """Lines that a person types."""

    def isatty(self) -> bool:
        return True


@cache
def parser_of(app: typer.Typer) -> Any:
    """The commands and their options; a process builds them once, tests call hundreds of commands in one."""
    return get_command(app)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli("run", "demo", "hi", stdin="...")`` runs a command; without ``stdin`` nothing is piped in, and ``typed`` is
    what a person types in its place.
    """

    def call(*argv: str, stdin: str | bytes = b"", typed: str | None = None) -> Result:
        raw = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
        if typed is not None:
            raw = typed.encode("utf-8")
        monkeypatch.setattr("typer.main.get_command", parser_of)
        kind = NoTerminal if typed is None else TypedInput
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(raw), encoding="utf-8"))
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@dataclass(slots=True)
class Opened:
    """What the commands asked to load, and the sessions they got."""

    pairs: list[Pair]
    loads: list[LoadConfig]
    sessions: list[ScriptedSession]
    make: Callable[[Pair], ScriptedSession]

    @property
    def session(self) -> ScriptedSession:
        return self.sessions[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, toys: Path) -> Opened:
    """Commands load scripted sessions; ``opened.make`` may be replaced."""
    record = Opened([], [], [], lambda _pair: ScriptedSession())
    real = loading.open_session

    def open_session(pair: Pair, config: LoadConfig, *_more: object) -> ScriptedSession:
        record.pairs.append(pair)
        record.loads.append(config)
        if config.draft and pair.drafter is None:
            real(pair, config)
        record.sessions.append(record.make(pair))
        return record.sessions[-1]

    monkeypatch.setattr(loading, "open_session", open_session)
    return record


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Bundled pairs that are there by name only."""
    folder = tmp_path / "toys"
    for name in bundled.BUNDLED:
        for part in ("target", "drafter"):
            (folder / name / part).mkdir(parents=True)
            (folder / name / part / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(bundled, "FOLDER", folder)
    return folder


@pytest.fixture
def chats(own_home: Path) -> Path:
    """Where the chats of this test are kept."""
    return own_home / ".local" / "share" / "dflash-local" / "chats"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder of the user's own."""
    folder = tmp_path / "local"
    folder.mkdir()
    return folder


TARGET, DRAFTER = "toys/Toy-9B", "z-toys/Toy-9B-DFlash"
OVERLAY = f"""schema: 1
pairs:
  - target: {TARGET}
    drafter: {DRAFTER}
    aliases: [toy-9b]
    family: toy
    fingerprints:
      - {{generation: v1, layers: 2, taps: [1, 3, 5, 6], mask_token_id: 1023, block_size: 8, window: null}}
    thinking: either
    gated: false
    sizes_gib: {{target: 0.01, drafter: 0.001}}
"""


def write_overlay(home: Path, text: str) -> None:
    """The user's own registry.yaml."""
    file = home / ".config" / "dflash-local" / "registry.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def contents(hub: FakeHub, repo: str) -> dict[str, bytes | Path]:
    """The files of a repository's first commit, to make another of them."""
    return {path: file.content for path, file in next(iter(hub.repos[repo].commits.values())).items()}


@pytest.fixture
def toy_hub(own_home: Path) -> Iterator[FakeHub]:
    """A hub that holds the bundled pair's files under other names, and a row of the registry for them."""
    write_overlay(own_home, OVERLAY)
    with FakeHub() as hub, online(hub):
        hub.add_folder(TARGET, bundled.FOLDER / "demo" / "target")
        hub.add_folder(DRAFTER, bundled.FOLDER / "demo" / "drafter")
        yield hub


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``asked = answers(True, False)``: somebody sits there and answers so; ``asked`` fills with the questions."""

    def prepare(*replies: bool) -> list[str]:
        left, asked = list(replies), []

        def ask(self: Console, question: str, default: bool) -> bool:
            asked.append(question)
            return left.pop(0) if left else default

        monkeypatch.setattr(Console, "can_ask", property(lambda self: True))
        monkeypatch.setattr(Console, "ask", ask)
        return asked

    return prepare


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program that stands for vLLM notes how it was launched."""
    return fake_program(tmp_path / "bin", monkeypatch)
