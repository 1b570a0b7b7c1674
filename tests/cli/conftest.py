"""The command line in-process: a scripted session behind it, toys that are empty folders."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import session as cli_session
from dflash_local.cli.main import main
from dflash_local.cli.session import LoadWish
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


class NoTerminal(io.TextIOWrapper):
    """Piped input."""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli("run", "demo", "hi", stdin="...")`` runs a command; without ``stdin`` nothing is piped in."""

    def call(*argv: str, stdin: str | bytes = b"") -> Result:
        raw = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", NoTerminal(io.BytesIO(raw), encoding="utf-8"))
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@dataclass(slots=True)
class Opened:
    """What the commands asked to load, and the sessions they got."""

    pairs: list[Pair]
    wishes: list[LoadWish]
    sessions: list[ScriptedSession]
    make: Callable[[Pair], ScriptedSession]

    @property
    def session(self) -> ScriptedSession:
        return self.sessions[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, toys: Path) -> Opened:
    """Commands load scripted sessions; ``opened.make`` may be replaced."""
    record = Opened([], [], [], lambda _pair: ScriptedSession())
    real = cli_session.open_session

    def open_session(pair: Pair, wish: LoadWish, progress: object = None) -> ScriptedSession:
        record.pairs.append(pair)
        record.wishes.append(wish)
        if wish.draft and pair.drafter is None:
            real(pair, wish)
        record.sessions.append(record.make(pair))
        return record.sessions[-1]

    monkeypatch.setattr(cli_session, "open_session", open_session)
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
