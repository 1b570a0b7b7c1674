"""Show a report of any machine, and what the installed version makes of it: python -m tools.replay FILE [--json].

Plans are made again for the reported memory, and failed kernels are compiled for their card, which need not be here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_local import settings, terminal
from dflash_local.app.fitting import row_choice, shapes
from dflash_local.app.models import model_store, registry
from dflash_local.errors import DFlashError
from dflash_local.tables import amount, indented, wrapped
from tools.replay.replayed import Shapes, replayed
from tools.replay.unpack import Damaged, unpack

MOST_COMPILED = 6  # a kernel takes a second or two
MOST_SHOWN = 12  # kernels and errors of a page; --json has all


def main(argv: list[str] | None = None) -> None:
    """Print the page, or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="what dflash doctor --report wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        found = replayed(unpack(given.file), _known(settings.load()))
    except (Damaged, OSError, DFlashError) as error:
        sys.exit(f"error: {error}")
    _compile_again(found["kernels"])
    print(json.dumps(found) if given.json else "\n".join(map(terminal.safe_line, replay_lines(found, 100))))


def _compile_again(kernels: list[dict[str, Any]]) -> None:
    """Enter under ``here`` whether each of the first failed kernels compiles here for its card."""
    if not kernels:
        return
    from tools.replay.recompile import recompiled  # torch

    for one in kernels[:MOST_COMPILED]:
        capability = one["capability"]
        if isinstance(capability, list) and len(capability) == 2 and all(type(part) is int for part in capability):
            one["here"] = recompiled(str(one["kernel"]), (capability[0], capability[1]))


def _known(user: settings.Settings) -> Callable[[str], Shapes | None]:
    """The shapes of a pair by its name, as the registry or the files here tell them."""
    rows, store = registry(user), model_store(user)

    def known(model: str) -> Shapes | None:
        try:
            row = rows.find(model)
            found = None if row is None else shapes(row_choice(row, user), store)
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
    page += ["", "memory of the last checks", *indented(memory_lines(found["memory"], width - 2))]
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


def memory_lines(memory: list[dict[str, Any]], width: int) -> list[str]:
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
