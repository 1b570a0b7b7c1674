"""Builds the command line and is the one place where errors become words and exit codes.

Imports nothing heavy: every command imports what it needs when it runs.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_local import __version__
from dflash_local.cli.console import Console, OutputClosed, hush_stdout, make_unbreakable
from dflash_local.cli.help_pages import HelpAll, HelpfulGroup
from dflash_local.errors import DFlashError, Interrupted, UsageError

# each is the function of the same name in the module of the same name, which has its EXAMPLES
GROUPS = {
    "Talk": ("run", "chat", "serve", "web", "race"),
    "Models": ("models", "show", "plan", "pull", "adapt", "rm"),
    "This machine": ("check", "ps", "stop", "certify", "bench", "doctor"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
PLANNING = ("show", "plan")  # load nothing: of the options for loading they take those that a plan depends on
PIPE_CLOSED = 141  # what a shell reports for a program ended by SIGPIPE
# typer re-exports only this leaf of the parser's errors; its root is found by name in old and new typer
_PARSE_ERROR: type[typer.BadParameter] = next(
    cls  # type: ignore[misc]  # it is a root of BadParameter, not BadParameter
    for cls in typer.BadParameter.__mro__
    if cls.__name__ == "ClickException"
)


class Commands(Mapping[str, Any]):
    """The commands by name; one is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _command_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Program(HelpfulGroup):
    """The program and its commands."""

    def panels(self) -> dict[str, list[tuple[str, str]]]:
        return {title: [(name, _first_sentence(name)) for name in names] for title, names in GROUPS.items()}

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands()  # type: ignore[assignment]  # it is only read


app = typer.Typer(
    name="dflash",
    cls=Program,
    epilog="dflash chat\ndflash plan Qwen/Qwen3.5-9B --gpu-memory 24",
    help="Run a language model with its DFlash drafter: the same text in less time.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        Console({}).data(f"dflash-local {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    help_all: HelpAll = False,
) -> None:
    """Without a command, say which there are."""
    if context.invoked_subcommand is None:
        Console({}).data_text(context.get_help())


def _first_sentence(name: str) -> str:
    """Return what the help of a command begins with, read off its file: importing all of them takes half a second."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    docstring = source.partition(f"\ndef {name}(")[2].partition('"""')[2].partition('"""')[0]
    return f"{docstring.partition('.')[0]}."


@functools.cache
def _command_of(name: str) -> Any:
    from dflash_local.cli.load_options import add_command

    module = importlib.import_module(f"dflash_local.cli.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    add_command(alone, name, getattr(module, name), examples=module.EXAMPLES, planning=name in PLANNING)
    return typer.main.get_command(alone)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code (``errors.py``) and never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = set(itertools.takewhile(lambda word: word != "--", arguments))
    make_unbreakable()
    try:
        return _invoke(arguments)
    except OutputClosed:
        hush_stdout()
        return PIPE_CLOSED
    except DFlashError as error:
        return _report(error, arguments, flags)
    except (KeyboardInterrupt, typer.Abort):
        return _report(Interrupted("interrupted"), arguments, flags)
    except SystemExit as stop:  # the parser writes its help itself and leaves so when nobody reads
        if isinstance(stop.__context__, BrokenPipeError):
            hush_stdout()
            return PIPE_CLOSED
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:  # one of the three broad ones: a user gets a line, not a traceback
        unexpected = DFlashError(
            f"unexpected failure: {type(error).__name__}: {error}", "run again with --debug and report the traceback"
        )
        unexpected.__cause__ = error
        return _report(unexpected, arguments, flags)


def _invoke(arguments: list[str]) -> int:
    try:
        code = app(args=arguments, prog_name="dflash", standalone_mode=False)
    except _PARSE_ERROR as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "dflash"
        message = error.format_message().rstrip(".")
        if message.startswith("No such command"):  # one line, with the nearest name where there is one
            raise UsageError(f"{message}{'' if message.endswith('?') else ':'} {command} --help lists them") from error
        raise UsageError(message, f"see {command} --help") from error
    if code == Interrupted("").exit_code:  # the parser turns Ctrl-C into this number
        raise Interrupted("interrupted")
    return code if isinstance(code, int) else 0


def _report(error: DFlashError, arguments: list[str], flags: set[str]) -> int:
    """Show an error as the user wants it, remember it, and give its exit code."""
    from dflash_local import settings

    try:
        user = settings.load()
    except DFlashError:  # the settings themselves may be what is wrong
        user = settings.load({"NO_COLOR": "1"})
    console = Console(user.environ)
    if "--debug" in flags or user.debug:
        console.note_text("".join(traceback.format_exception(type(error), error, error.__traceback__)), end="")
    console.error(error, as_json="--json" in flags)
    if user.state_dir is not None and not isinstance(error, Interrupted):
        from dflash_local.report import errors_log
        from dflash_local.store.kept import take_unkept

        errors_log.remember(user.state_dir, _command(arguments), error)
        lost = take_unkept()
        if lost and "--json" not in flags:
            console.warn(lost)
    return error.exit_code


def _command(arguments: list[str]) -> str:
    """The command that was called; empty where the first word is none, whatever it is."""
    word = next((word for word in arguments if not word.startswith("-")), "")
    return word if word in COMMANDS else ""
