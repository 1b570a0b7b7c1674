"""The help of every command: usual options in three groups and two examples; all options under ``--help-all``.

An option stands in the group that its ``rich_help_panel`` names. Imports nothing heavy.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dflash_local.cli.console import Console

LOADING = "Loading"
MORE, MORE_LOADING = "More options", "More of loading"  # shown by --help-all alone
PANELS = ("Arguments", "Options", LOADING, MORE, MORE_LOADING)
ALL = "dflash.help_all"  # in a context's meta: everything is shown


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[ALL] = True
        Console({}).data_text(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show every option and exit.", is_eager=True, callback=_show_all),
]


class HelpfulCommand(TyperCommand):
    """A command whose help has a section for each panel, and its epilog's lines as examples.

    An option whose value is in brackets there may stand without it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = {name for param in self.params for name in param.opts if str(param.metavar).startswith("[")}
        following = [*args[1:], "--"]
        given = [
            [word, ""] if word in bare and after.startswith("-") else [word] for word, after in zip(args, following)
        ]
        return super().parse_args(ctx, [word for words in given for word in words])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {title: [] for title in PANELS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            if record is not None:
                panels[getattr(param, "rich_help_panel", None) or usual].append(record)
        for title, records in panels.items():
            if records and (title not in (MORE, MORE_LOADING) or ctx.meta.get(ALL)):
                with formatter.section(title):
                    formatter.write_dl(records, col_max=22)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(self.epilog, formatter)


class HelpfulGroup(TyperGroup):
    """The program, whose help has a section for each panel of commands."""

    def panels(self) -> dict[str, list[tuple[str, str]]]:
        """Return names and first sentences of commands by the title of their panel."""
        raise NotImplementedError

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in self.panels().items():
            with formatter.section(title):
                formatter.write_dl(commands)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(self.epilog, formatter)


def _write_examples(epilog: str | None, formatter: Any) -> None:
    with formatter.section("Examples"):
        for line in (epilog or "").splitlines():
            formatter.write(f"  {line}\n")
