"""``dflash report``: one archive for a bug report, shown before it is written, sent nowhere, read again elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local import settings
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import DFlashError, UsageError
from dflash_local.tables import Column, amount, indented, table, wrapped

if TYPE_CHECKING:
    from dflash_local.report.replay import Shapes

MOST_COMPILED = 6  # a kernel takes a second or two
MOST_SHOWN = 12  # kernels and errors of a page; --json has all


def report(
    out: Annotated[Path | None, opt.named("--out", "FILE", "The archive; a name with the time if not given.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print every part in full.")] = False,
    replay: Annotated[Path | None, opt.named("--replay", "FILE", "Read a report, of any machine, instead.")] = None,
    yes: opt.Yes = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Put what a bug report needs into one archive: no prompts, replies, paths, names or tokens. Sends nothing."""
    call = Invocation.begin()
    user, console = call.user, call.console
    if replay is not None:
        if out is not None or show or yes:
            raise UsageError("--replay reads a report and writes none", "leave --out, --show and --yes away")
        _replay(replay, console, user, as_json)
        return
    _write(_target(out), console, user, show, yes, as_json)


def _target(out: Path | None) -> Path:
    path = out or Path(f"dflash-report-{datetime.now():%Y%m%d-%H%M%S}.zip")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r}", "make it, or give --out another file")
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder", "give --out a file, such as report.zip")
    return path


def _write(path: Path, console: Console, user: settings.Settings, show: bool, yes: bool, as_json: bool) -> None:
    from dflash_local.cli import report_parts
    from dflash_local.report import archive
    from dflash_local.store.atomic import write_atomic

    parts = report_parts.collect(user)
    sizes = {name: len(archive.encoded(part)) for name, part in parts.items()}
    descriptions = {name: words for name, (_, words) in report_parts.PARTS.items()}
    if not as_json:
        _show_parts(console, parts, sizes, descriptions, show)
    question = f"{'Replace' if path.exists() else 'Write'} {path}?"
    if not yes and not (console.can_ask and console.ask(question, default=False)):
        if console.can_ask:
            console.note("nothing was written")
            return
        raise UsageError("nothing was written: nobody is there to agree", "dflash report --yes writes what is shown")
    try:
        write_atomic(path, archive.pack(parts))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "give --out another file") from error
    if as_json:
        console.json({"file": str(path), "bytes": path.stat().st_size, "sizes": sizes, "parts": parts})
    else:
        console.note(
            f"written: {path} ({amount(path.stat().st_size)}); nothing was sent, attach it to an issue yourself"
        )


def _show_parts(
    console: Console, parts: Mapping[str, Any], sizes: Mapping[str, int], descriptions: Mapping[str, str], show: bool
) -> None:
    """The parts with their sizes, and what stands in them if that is wanted."""
    columns = (Column("PART"), Column("SIZE", right=True), Column("WHAT IT TELLS", shrinks=True))
    rows = [(f"{name}.json", amount(sizes[name]), descriptions[name]) for name in parts]
    console.lines(table(columns, rows, console.columns))
    if not show:
        console.note("dflash report --show prints all of it")
        return
    for name, part in parts.items():
        console.data()
        console.data(f"{name}.json", "bold")
        console.data_text(json.dumps(part, indent=1, ensure_ascii=False))


def _replay(path: Path, console: Console, user: settings.Settings, as_json: bool) -> None:
    from dflash_local.report import archive, replay

    found = replay.replayed(archive.unpack(path), _known(user))
    _compile_again(found["kernels"], console)
    console.result(found, replay_lines(found, console.columns), as_json)


def _compile_again(kernels: list[dict[str, Any]], console: Console) -> None:
    """Enter under ``here`` whether each of the first failed kernels compiles here for its card, which need not be."""
    if not kernels:
        return
    try:
        from dflash_local.kernels.recompile import recompiled
    except ImportError:  # no torch
        return
    with console.progress() as progress:
        for number, one in enumerate(kernels[:MOST_COMPILED]):
            progress("compiling failed kernels for their card", number / min(len(kernels), MOST_COMPILED))
            capability = one["capability"]
            if isinstance(capability, list) and len(capability) == 2 and all(type(part) is int for part in capability):
                one["here"] = recompiled(str(one["kernel"]), (capability[0], capability[1]))


def _known(user: settings.Settings) -> Callable[[str], Shapes | None]:
    """The shapes of a pair by its name, as the registry or the files here tell them."""
    from dflash_local.app.fitting import row_shapes
    from dflash_local.app.models import model_store, registry

    rows, store = registry(user), model_store(user)

    def known(model: str) -> Shapes | None:
        try:
            row = rows.find(model)
            found = None if row is None else row_shapes(row, user, store)
        except DFlashError:
            return None
        return None if found is None else (found.target, found.drafter)

    return known


def replay_lines(found: Mapping[str, Any], width: int) -> list[str]:
    """A report and what this version says to it, as a page."""
    versions, machine = found["versions"], found["machine"] if isinstance(found["machine"], dict) else {}
    gpus = machine.get("gpus")
    gpus = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    cards = ", ".join(f"{gpu.get('name')} ({_bytes(gpu.get('memory'))})" for gpu in gpus) or "no GPU"
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    page = wrapped(f"report of {found['created']}", width)
    page += wrapped(f"machine: {machine.get('system')}, {cards}, driver {machine.get('driver') or 'unknown'}", width)
    page += wrapped(f"versions: {libraries}", width)
    for name, each in found["not_measured"].items():
        page += wrapped(f"not measured: {name} {each['reported']}; figures come from {each['measured']}", width)
    for check in found["problems"]:
        page += wrapped(f"problem: {check.get('name')}: {check.get('value')}", width)
    page += ["", "plans, made again for that memory", *indented(_plan_lines(found["plans"], width - 2))]
    page += ["", "memory of the last checks", *indented(_memory_lines(found["memory"], width - 2))]
    page += ["", "kernels that failed", *indented(_kernel_lines(found["kernels"], width - 2))]
    page += ["", "last errors", *indented(_error_lines(found["errors"], width - 2))]
    return page


def _plan_lines(plans: list[dict[str, Any]], width: int) -> list[str]:
    lines = []
    for one in plans:
        if one.get("error"):
            lines += wrapped(f"{one['model']}: not planned again: {one['error']}", width)
            continue
        now = one["now"]
        same = f"as there: {now['format']}, {now['engine']}, context {now['context']}, {_bytes(now['total'])}"
        lines += wrapped(f"{one['model']}: {'differs' if one['changes'] else same}", width)
        for name, before, after in one["changes"]:
            lines += indented(wrapped(f"{name}: {_value(name, before)} -> {_value(name, after)}", width - 2))
    return lines or ["none"]


def _memory_lines(memory: list[dict[str, Any]], width: int) -> list[str]:
    lines = []
    for one in memory:
        again = one["replanned"]
        now = f"; planned now {_bytes(again)}" if again is not None else "; no plan of that load to make again"
        text = f"planned {_bytes(one['planned'])}, peak {_bytes(one['peak'])}, off by {one['off']:+.2%}"
        lines += wrapped(f"{one['model']}: {text}{now}", width)
    return lines or ["none on a card"]


def _kernel_lines(kernels: list[dict[str, Any]], width: int) -> list[str]:
    lines = []
    for one in kernels[:MOST_SHOWN]:
        lines += wrapped(f"{one['verdict']} on {one['card']}: {one['kernel']}", width)
        lines += indented(wrapped(f"here for that card: {one['here']}", width - 2)) if "here" in one else []
    if len(kernels) > MOST_SHOWN:
        lines.append(f"and {len(kernels) - MOST_SHOWN} more; --json lists all")
    if kernels:
        lines += wrapped(f"on such a card this tries them again: {kernels[0]['command']}", width)
    return lines or ["none"]


def _error_lines(errors: list[Mapping[str, Any]], width: int) -> list[str]:
    lines = []
    for one in errors[-MOST_SHOWN:]:
        where = one.get("where")
        place = where[-1] if isinstance(where, list) and where else "unknown place"
        text = one.get("message") or "a message that was not kept"
        command = f"dflash {one.get('command') or ''}".strip()
        lines += wrapped(
            f"{one.get('time')} {command}: {one.get('error')}: {text} (exit {one.get('exit_code')}; {place})", width
        )
    return lines or ["none"]


def _value(name: str, value: Any) -> str:
    plain = name in ("context", "fits") or isinstance(value, bool)
    return str(value) if plain or not isinstance(value, int) else amount(value)


def _bytes(value: Any) -> str:
    return amount(value) if isinstance(value, (int, float)) else "unknown"
