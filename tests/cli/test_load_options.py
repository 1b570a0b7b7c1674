"""Every command that loads a pair has every option, made of the fields of ``LoadConfig``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer

from dflash_local.cli.main import app
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import Client
from tests.load_samples import SAMPLES

LOADING = {"run", "chat", "race", "serve", "web", "bench", "certify", "check", "adapt"}
PLANNING = {"plan", "show"}
OFFERED = {name for name, option in LOAD_OPTIONS.items() if not option.spelled}
WANTED = LoadConfig(**{name: SAMPLES[name] for name in OFFERED})


def options_of(command: str) -> dict[str, object]:
    """The parameters of a command that are load options."""
    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    return {param.name: param for param in parameters if param.name in LOAD_OPTIONS}


def test_all_commands_have_the_options_of_what_they_do() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    planned = {name for name in OFFERED if LOAD_OPTIONS[name].planned}
    for command in commands:
        want = OFFERED if command in LOADING else planned if command in PLANNING else set()
        found = set(options_of(command)) - ({"allow_mismatch"} if command == "pull" else set())
        assert found == want, command


@pytest.mark.parametrize("command", sorted(LOADING | PLANNING))
def test_they_stand_in_panels_of_their_own(command: str, cli: Cli) -> None:
    shown = cli(command, "--help-all").out
    assert shown.count("\nLoading:\n") == shown.count("\nMore of loading:\n") == 1
    usual = shown.replace(shown.partition("\nLoading:\n")[2].partition("\nMore options:\n")[0], "")
    usual, _, rest = usual.partition("\nMore of loading:\n")
    for name in options_of(command):
        flag, own = LOAD_OPTIONS[name].flag, (command, name) == ("bench", "context")
        assert flag in shown and (flag not in usual or own)
    assert rest and max(map(len, shown.splitlines())) <= 80


def argv_of(command: str) -> list[str]:
    argv = [command, "demo", *(["hi"] if command == "run" else [])]
    return [*argv, "--plain"] if command in ("chat", "race") else argv


@pytest.mark.parametrize("command", ["run", "chat", "race"])
def test_every_option_reaches_the_load(command: str, cli: Cli, opened: Opened) -> None:
    assert cli(*argv_of(command), *WANTED.arguments()).code == 0
    assert opened.loads == [WANTED]


def test_serve_loads_with_every_option_and_again_when_it_loads_again(
    serving: Callable[..., Result], opened: Opened
) -> None:
    def visit(client: Client) -> None:
        for path, body in (("load", {"model": "demo"}), ("unload", {}), ("load", {"model": "demo"})):
            client.call(f"/dflash/v1/{path}", body)
        client.call("/dflash/v1/load", {"model": "demo-hybrid"})

    assert serving(visit, "demo", *WANTED.arguments()).code == 0
    assert opened.loads == [WANTED] * 3 and len({pair.name for pair in opened.pairs}) == 2


def test_the_command_line_wins_over_the_variable(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_EXACT", "1")
    monkeypatch.setenv("DFLASH_DRAFTER_PRECISION", "8bit-head")
    assert cli("run", "demo", "hi", "--no-fit-check").code == 0
    assert cli("run", "demo", "hi", "--no-fit-check", "--no-exact", "--drafter-precision", "frequent").code == 0
    found = [(load.exact, load.drafter_precision) for load in opened.loads]
    assert found == [(True, "8bit-head"), (False, "frequent")]


def test_a_bad_value_is_refused_in_one_line_before_anything_is_loaded(cli: Cli, opened: Opened) -> None:
    for words in (["--draft-window", "0"], ["--device", "tpu"], ["--kv-cache", "fp8"], ["--attention-factor", "0"]):
        refused = cli("race", "demo", *words)
        assert refused.code == 2 and words[0] in refused.err and words[1] in refused.err
    assert not opened.loads
