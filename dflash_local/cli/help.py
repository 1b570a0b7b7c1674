"""``dflash help`` and ``dflash version``: the words other programs answer to, for ``--help`` and ``--version``."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_local import __version__
from dflash_local.cli.console import Console


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("help")(help_)
    app.command("version")(version)


def help_(
    context: typer.Context,
    command: Annotated[
        str, typer.Argument(metavar="[COMMAND]", help="The command to explain; all in short if none.")
    ] = "",
) -> None:
    """Explain a command, as its --help does."""
    root = context.find_root()
    arguments = [command, "--help"] if command else ["--help"]
    root.command.main(args=arguments, prog_name=root.info_name, standalone_mode=False)


def version() -> None:
    """Show the version."""
    Console({}).data(f"dflash-local {__version__}")
