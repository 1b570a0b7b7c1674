"""How ``certify`` and ``bench`` end: the figures and the file of ``--report``; and files of options as such."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

from dflash_local.cli.options import named
from dflash_local.errors import UsageError
from dflash_local.planner.hardware import folder
from dflash_local.store.atomic import write_atomic

if TYPE_CHECKING:
    from dflash_local.bench.report import Found
    from dflash_local.cli.invocation import Invocation

Report = Annotated[Path | None, named("--report", "FILE", "Write the whole report there as JSON.")]


def check_path(option: str, file: Path | None) -> None:
    """Refuse before the work is done what cannot be written after it."""
    if file is None:
        return
    file = file.expanduser()
    if file.is_dir():
        raise UsageError(f"{option} {file} is a folder", "give the name of a file")
    above = file.absolute().parent
    if not folder(above).writable or not _takes_files(above):
        raise UsageError(f"{option} {file} cannot be written", "give a file in a folder you may write to")


def _takes_files(above: Path) -> bool:
    """Tell whether a file can be made in a folder that exists; /proc calls itself writable."""
    if not above.is_dir():
        return True
    try:
        with TemporaryFile(dir=above):
            return True
    except OSError:
        return False


def write(option: str, file: Path, data: str | bytes) -> None:
    """Write the file of an option: whole or not at all, for its owner alone. UsageError: it cannot be written."""
    try:
        write_atomic(file.expanduser(), data)
    except OSError as error:
        raise UsageError(f"{option} {file}: {error.strerror}", "give a file in a folder you may write to") from error


def conclude(call: Invocation, found: Found, as_json: bool, file: Path | None) -> None:
    """Show what was measured, keep it for ``dflash doctor --row`` and write it to the file of ``--report``.

    Raises:
        UsageError: the file cannot be written.
    """
    from dflash_local.app.card_reports import keep_measured

    content, lines = found
    call.console.result(content, lines, as_json)
    text = json.dumps(content, indent=1, ensure_ascii=True) + "\n"
    keep_measured(content, text, call.user)
    if file is None:
        return
    write("--report", file, text)
    call.console.note(f"report written: {file}", "dim")
