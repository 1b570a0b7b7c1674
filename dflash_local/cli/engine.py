"""``dflash engine``: vLLM and SGLang in environments of their own, to be launched by ``--engine`` without ``--url``."""

from __future__ import annotations

import threading
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.reply import first_interrupt
from dflash_local.errors import UnknownModelError, UsageError
from dflash_local.tables import Column, amount, table

if TYPE_CHECKING:
    from dflash_local.app.engine_install import Installed
    from dflash_local.settings import Settings

COLUMNS = (
    *(Column("PROGRAM"), Column("VERSION"), Column("PYTHON"), Column("ON DISK", right=True)),
    Column("FOLDER", shrinks=True),
)

app = typer.Typer(
    name="engine",
    help="Install, list and remove vLLM and SGLang, each in an environment of its own.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class ProgramChoice(str, Enum):
    """A program that serves models."""

    vllm = "vllm"
    sglang = "sglang"


Program = Annotated[ProgramChoice, typer.Argument(metavar="vllm|sglang", help="The program.", show_default=False)]
Python = Annotated[
    Path | None, opt.named("--python", "PATH", "Make the environment with this Python instead of the own one.")
]


@app.command()
def install(program: Program, python: Python = None, yes: opt.Yes = False, debug: opt.Debug = False) -> None:
    """Download a pinned release of the program, several GiB, into an environment of its own."""
    from dflash_local.app import engine_install

    call = Invocation.begin()
    user, console = call.user, call.console
    release = engine_install.RELEASES[program.value]
    before = _found(program, user)
    if before is not None and before.version == release.version:
        console.data(f"{release.title} is installed: {before.folder}")
        return
    chosen = engine_install.check_machine(release, user, python)
    size = f"about {release.download_gib:g} GiB to download, {release.disk_gib:g} GiB on disk"
    where = engine_install.engines_folder(user) / program.value
    console.note(f"{release.title} ({release.requirement}): {size} (approximate), into {where}")
    if not yes:
        if not console.can_ask:
            raise UsageError("nobody can be asked whether to download this", "--yes says so")
        if not console.ask("Install it?", default=True):
            console.data("nothing was installed")
            return
    stop = threading.Event()
    with first_interrupt(stop.set), console.progress():
        made = engine_install.install(release, user, chosen, console.show_progress, stop.is_set)
    console.data(f"{release.title} is installed: {made.folder}, {amount(made.bytes)}")
    console.note(f"dflash chat MODEL --engine {program.value} launches it")


@app.command("list")
def list_(as_json: opt.Json = False, debug: opt.Debug = False) -> None:
    """List the programs that are installed, with versions and sizes on disk."""
    from dflash_local.app.engine_install import installed

    call = Invocation.begin()
    found = installed(call.user)
    rows = [
        (one.program, one.version or "unfinished", one.python or "-", amount(one.bytes), str(one.folder))
        for one in found
    ]
    own = call.user.own_programs
    lines = table(COLUMNS, rows, call.console.columns) if rows else ["none; dflash engine install vllm installs one"]
    lines += [f"used instead: {path} (DFLASH_{name.upper()}, or settings.json)" for name, path in own.items()]
    call.console.result({"engines": [one.as_dict() for one in found], "own": own}, lines, as_json)


@app.command()
def remove(program: Program, yes: opt.Yes = False, debug: opt.Debug = False) -> None:
    """Remove an installed program with all that was installed for it."""
    from dflash_local.app import engine_install

    call = Invocation.begin()
    console = call.console
    one = _found(program, call.user)
    if one is None:
        raise UnknownModelError(f"{program.value} is not installed", "dflash engine list shows what is")
    if not yes:
        if not console.can_ask:
            raise UsageError("nobody can be asked whether to remove this", "--yes says so")
        if not console.ask(f"Remove {one.folder} ({amount(one.bytes)})?", default=False):
            console.data("nothing was removed")
            return
    engine_install.remove(one, call.user)
    console.data(f"removed {one.program}: {amount(one.bytes)} freed")


def _found(program: ProgramChoice, user: Settings) -> Installed | None:
    from dflash_local.app.engine_install import installed

    return next((one for one in installed(user) if one.program == program.value), None)
