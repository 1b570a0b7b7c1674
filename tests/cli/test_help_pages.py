"""Help that is read in one look: forty lines, three groups, two examples that work; everything under --help-all."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from dflash_local.cli.help_pages import MORE, MORE_LOADING
from dflash_local.cli.main import COMMANDS, GROUPS, app
from tests.cli.conftest import Cli


def command_of(name: str) -> Any:
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_help_all_whole(cli: Cli, name: str) -> None:
    short, whole = (cli(name, option) for option in ("--help", "--help-all"))
    assert short.code == whole.code == 0
    lines = short.out.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert titles[-1] == "Examples:" and len(titles) <= 4
    for param in command_of(name).params:
        for flag in (each for each in (*param.opts, *param.secondary_opts) if each.startswith("--")):
            assert flag in whole.out.split(), flag
            behind = getattr(param, "rich_help_panel", None) in (MORE, MORE_LOADING)
            assert (f"  {flag}" in short.out or f"/ {flag}" in short.out or f", {flag}" in short.out) is not behind, (
                flag
            )


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_command_lines_of_the_command(name: str) -> None:
    command = command_of(name)
    examples = command.epilog.splitlines()
    assert len(examples) == 2
    for example in examples:
        words = shlex.split(example.rpartition("| ")[2])
        assert words[:2] == ["dflash", name]
        command.make_context(name, words[2:])  # raises for an option that there is not


def test_commands_stand_in_three_groups(cli: Cli) -> None:
    text = cli("--help").out
    assert len(text.splitlines()) <= 40 and "..." not in text.partition("\n\n")[2]
    for title, names in GROUPS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert tuple(line.split()[0] for line in section.splitlines() if line[2] != " ") == names
        flat = " ".join(section.split())
        assert all(command_of(name).get_short_help_str(limit=200) in flat for name in names)
