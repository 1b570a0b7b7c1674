"""``dflash doctor``: what is wrong with this machine and installation, or one archive about them for a bug report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local import __version__
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.tables import Column, amount, table

if TYPE_CHECKING:
    from dflash_local.cli.doctor_checks import Check, Status

STYLES: dict[Status, str] = {"ok": "green", "info": "dim", "problem": "red"}
REPORT = "Write an archive for a bug report instead; asks first, sends nothing."

ROW = "Print the last bench as a line of JSON to share, with the hash of its certificate."
EXAMPLES = ("dflash doctor", "dflash doctor --row")


def doctor(
    report: Annotated[Path | None, opt.named("--report", "FILE", REPORT)] = None,
    show: Annotated[bool, typer.Option("--show", help="Print in full what --report writes.")] = False,
    row: Annotated[bool, typer.Option("--row", help=ROW)] = False,
    yes: opt.Yes = False,
    json_: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Look at this machine and installation, and say what to mend."""
    if row:
        if report is not None or show:
            raise UsageError("--row does not go with --report", "give one of them")
        _row()
        return
    if report is not None or show:
        _report(report, show, yes, json_)
        return
    from dflash_local.cli.doctor_checks import checked

    environ, checks = checked()
    console = Console(environ)
    problems = sum(check.status == "problem" for check in checks)
    if json_:
        console.json({"version": __version__, "problems": problems, "checks": [asdict(check) for check in checks]})
    else:
        _show_checks(console, checks, problems)
    raise typer.Exit(1 if problems else 0)


def _show_checks(console: Console, checks: list[Check], problems: int) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.data(f"{check.status:<8}", STYLES[check.status], end="")
        console.data(f"{check.name:<{width}}  {check.value}")
        if check.fix:
            console.data(f"{'':<{8 + width}}  -> {check.fix}")
    console.data({0: "No problems.", 1: "1 problem."}.get(problems, f"{problems} problems."))


def _row() -> None:
    """Print the line, and say what it lacks and where it goes."""
    from msgspec import to_builtins

    from dflash_local.app.card_reports import card_report
    from dflash_local.planner.cards import file_stem

    call = Invocation.begin()
    made = card_report(call.user)
    call.console.data(json.dumps(to_builtins(made)))
    if made.certificate is None and made.weights == "released":
        call.console.note(f"it has no certificate: dflash certify {made.pair} with the same options makes one")
    file = f"dflash_local/catalog/reports/{file_stem(made.card)}.jsonl"
    call.console.note(f"nothing was sent; a pull request that adds the line to {file} shares it")


def _report(path: Path | None, show: bool, yes: bool, as_json: bool) -> None:
    """Show what a bug report needs, without prompts, replies, paths, names and tokens, and write it where agreed."""
    from dflash_local.cli import report_parts
    from dflash_local.report import archive

    call = Invocation.begin()
    console = call.console
    if path is not None:
        _check_place(path)
    parts = report_parts.collect(call.user)
    sizes = {name: len(archive.encoded(part)) for name, part in parts.items()}
    found: dict[str, Any] = {"file": None, "bytes": None, "sizes": sizes, "parts": parts}
    if not as_json:
        _show_parts(console, parts, sizes, show)
    if path is not None:
        if not _may_write(console, path, yes):
            return
        _write(path, archive.pack(parts))
        size = path.stat().st_size
        found |= {"file": str(path), "bytes": size}
        console.note(f"written: {path} ({amount(size)}); nothing was sent, attach it to an issue yourself")
    if as_json:
        console.json(found)


def _check_place(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r}", "make it, or give another file")
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder", "give a file, such as report.zip")


def _may_write(console: Console, path: Path, yes: bool) -> bool:
    """True where the user agrees; UsageError where nobody is there to."""
    if yes:
        return True
    if not console.can_ask:
        raise UsageError("nothing was written: nobody is there to agree", "--yes writes what is shown")
    agreed = console.ask(f"{'Replace' if path.exists() else 'Write'} {path}?", default=False)
    if not agreed:
        console.note("nothing was written")
    return agreed


def _write(path: Path, content: bytes) -> None:
    from dflash_local.store.atomic import write_atomic

    try:
        write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "give another file") from error


def _show_parts(console: Console, parts: Mapping[str, Any], sizes: Mapping[str, int], show: bool) -> None:
    """Print the parts with their sizes, and what stands in them if that is wanted."""
    from dflash_local.cli.report_parts import PARTS

    columns = (Column("PART"), Column("SIZE", right=True), Column("WHAT IT TELLS", shrinks=True))
    rows = [(f"{name}.json", amount(sizes[name]), PARTS[name][1]) for name in parts]
    console.lines(table(columns, rows, console.columns))
    if not show:
        console.note("--show prints all of it")
        return
    for name, part in parts.items():
        console.data()
        console.data(f"{name}.json", "bold")
        console.data_text(json.dumps(part, indent=1, ensure_ascii=False))
