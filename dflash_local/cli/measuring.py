"""What ``certify`` and ``bench`` share: the engine's session, the held-out prompts, the report file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dflash_local.catalog.bundled import FOLDER, Pair
from dflash_local.cli.console import Console
from dflash_local.cli.session import held, load_pair, warn_of
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.planner.hardware import folder
from dflash_local.settings import Settings
from dflash_local.store.atomic import write_atomic

if TYPE_CHECKING:
    from dflash_local.engine.session import Session

HELD_OUT = FOLDER / "heldout.json"

Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the whole report there as JSON.")]


@contextmanager
def loaded_engine(pair: Pair, load: LoadConfig, user: Settings, console: Console) -> Iterator[Session]:
    """The engine's session itself, closed at the end: measuring looks behind events. It is not checked unasked."""
    with held(pair, user):
        session = cast("Session", load_pair(pair, load, user, console))
        warn_of(session, console)
        try:
            yield session
        finally:
            session.close()


def check_report_path(file: Path | None) -> None:
    """Refuse before the work is done what cannot be written after it."""
    if file is None:
        return
    file = file.expanduser()
    if file.is_dir():
        raise UsageError(f"--report {file} is a folder", "give the name of a file")
    if not folder(file.absolute().parent).writable:
        raise UsageError(f"--report {file} cannot be written", "give a file in a folder you may write to")


def save_report(file: Path, found: dict[str, Any], console: Console) -> None:
    """Write a report whole or not at all, readable by its owner alone.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        write_atomic(file.expanduser(), json.dumps(found, indent=1, ensure_ascii=True) + "\n")
    except OSError as error:
        raise UsageError(f"--report {file}: {error.strerror}", "give a file in a folder you may write to") from error
    console.note(f"report written: {file}", "dim")
