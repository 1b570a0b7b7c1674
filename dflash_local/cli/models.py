"""``dflash models``: every pair of the registry at a glance, what of them is on this disk, or what cards run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app import fitting
from dflash_local.app.models import InstallStatus, ModelStore, install_status, model_store, registry
from dflash_local.app.recommending import Summary, row_summary
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import UsageError
from dflash_local.tables import UNKNOWN, Column, amount, field, gib, in_gib, natural_width, table, wrapped
from dflash_local.ui.pair_text import marks
from dflash_local.ui.plan_text import machine_line, speed_range

if TYPE_CHECKING:
    from dflash_local.planner.machine import Machine
    from dflash_local.store.gguf_here import GgufHere
    from dflash_local.store.local import Local

SHOWN = {"absent": "not here"}
VERIFIED = {True: "yes", False: "no", None: UNKNOWN}
WIDE = (
    Column("MODEL", shrinks=True),
    Column("DRAFTER"),
    Column("RUNS ON"),
    Column("DOWNLOAD", right=True),
    Column("STATE"),
    Column("FITS"),
    Column("TOK/S", right=True),
    Column("MARKS"),
)
NARROW = (Column("MODEL", shrinks=True), Column("GIB", right=True), *WIDE[4:])
LOCAL = (
    *(Column("PAIR", shrinks=True), Column("PART"), Column("ON DISK", right=True)),
    *(Column("COMMIT"), Column("VERIFIED"), Column("STATE", shrinks=True)),
)
GGUF = (
    *(Column("GGUF FILE", shrinks=True), Column("SIZE", right=True), Column("OF")),
    Column("PATH"),  # whole, to be copied
)

EXAMPLES = ("dflash models --gpu-memory 24", "dflash models --here")


def models(
    here: Annotated[bool, typer.Option("--here", help="Only what is on this machine, with sizes on disk.")] = False,
    cards: Annotated[bool, typer.Option("--cards", help="What runs on GPUs of 8 to 80 GB, and how fast.")] = False,
    gpu_memory: opt.GpuMemory = None,
    gpu: opt.Gpu = None,
    prefer: opt.Prefer = opt.PreferenceChoice.balanced,
    markdown: Annotated[bool, typer.Option("--markdown", help="--cards as a page of docs.")] = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """List all pairs: their size, what is here, and how they fit this machine."""
    call = Invocation.begin()
    user, console = call.user, call.console
    if cards or markdown:
        _show_cards(call, gpu_memory, prefer, markdown, as_json)
        return
    store = model_store(user)
    rows = [install_status(row, store) for row in registry(user).rows]
    if here:
        from dflash_local.store.gguf_here import gguf_here

        _here(console, store, rows, gguf_here(user), as_json)
        return
    where = fitting.machine(user, gpu, gpu_memory)
    found = [(item, row_summary(item.row, where, user, prefer.value)) for item in rows]
    report = {"machine": where.as_dict(), "pairs": [_as_json(*entry) for entry in found]}
    console.result(report, _table(found, where, console.columns), as_json)


def _show_cards(
    call: Invocation, gpu_memory: float | None, prefer: opt.PreferenceChoice, markdown: bool, as_json: bool
) -> None:
    """Print the table of usual cards, or of the one with so much memory in GiB."""
    from msgspec import to_builtins

    from dflash_local.app.cards import card_tables
    from dflash_local.catalog.reports import reports
    from dflash_local.planner.cards import TYPICAL
    from dflash_local.ui import card_text

    chosen = [card for card in TYPICAL if gpu_memory is None or round(card[1]) == round(gpu_memory)]
    if not chosen:
        sizes = ", ".join(f"{round(gib)}" for _, gib in TYPICAL)
        raise UsageError(
            f"--gpu-memory {gpu_memory:g} is none of the table's", f"it has {sizes}; dflash plan takes any"
        )
    tables = card_tables(call.user, reports(), chosen, prefer.value)
    found = [
        {
            "machine": each.machine.as_dict(),
            "pairs": [
                {
                    **row.summary.as_dict(),
                    "longest_context": row.longest_context,
                    "option": row.summary.best and row.summary.best.as_dict(),
                    "over_two": row.over_two and row.over_two.as_dict(),
                }
                for row in each.rows
            ],
            "reports": to_builtins(each.reports),
        }
        for each in tables
    ]
    of_these = [report for each in tables for report in each.reports]
    others = [report for report in reports() if report not in of_these] if gpu_memory is None else []
    text = card_text.markdown(tables, others) if markdown else card_text.lines(tables, others, call.console.columns)
    call.console.result({"cards": found, "other_reports": to_builtins(others)}, text, as_json)


def _table(found: list[tuple[InstallStatus, Summary]], where: Machine, width: int) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for item, summary in found:
        row, word = item.row, summary.fits
        size = "-" if row.bundled else gib(summary.download_gib, summary.computed)
        state = SHOWN.get(item.state, item.state)
        drafter = row.status if row.kind == "dflash" else f"{row.status} {row.kind}"
        rest = [mark for mark in marks(row) if mark not in (row.status, row.kind)]
        runs_on, drafted = "local" if row.runs_here else "server", summary.drafted_tokens_per_s
        speed = "" if drafted is None else speed_range(drafted)  # a column of none is not shown
        rows.append((row.name, drafter, runs_on, size, state, word, speed, ", ".join(rest)))
    columns: tuple[Column, ...] = WIDE
    if natural_width(WIDE, rows) > width:  # the drafter's status moves to the marks; "server" stands under FITS
        columns = NARROW
        rows = [
            (name, size.removesuffix(" GiB"), state, word.removeprefix("fits "), speed, ", ".join(marks(item.row)))
            for (name, _, _, size, state, word, speed, _), (item, _) in zip(rows, found, strict=True)
        ]
    if natural_width(columns, rows) > width:  # names are there to be copied; dflash show has the marks
        columns = columns[:-1]
        rows = [tuple("-" if cell == SHOWN["absent"] else cell for cell in row[:-1]) for row in rows]
    lines = table(columns, rows, width)
    lines += ["", *field("fits on", machine_line(where), width, 9)]
    servers = "server: vLLM or SGLang run it, not this program; " if any("server" in row for row in rows) else ""
    return [*lines, *wrapped(f"{servers}dflash show MODEL tells more; dflash pull MODEL downloads.", width)]


def _as_json(item: InstallStatus, summary: Summary) -> dict[str, Any]:
    import msgspec  # not for ``dflash --help``

    plan = summary.plan
    return {
        **msgspec.to_builtins(item.row),
        "state": item.state,
        "local_bytes": item.size,
        "missing": list(item.missing),
        "verified": item.verified,
        "fits": summary.fits,
        "summary": summary.as_dict(),
        "why_not_here": item.row.why_not_here,
        "plan": None if plan is None else {"format": plan.format, "context": plan.context, "draft": plan.load.draft},
    }


def _here(
    console: Console, store: ModelStore | None, rows: list[InstallStatus], files: Sequence[GgufHere], as_json: bool
) -> None:
    """Show what the cache holds of the registry's pairs, and GGUF files; repositories of no pair are only counted."""
    from dflash_local.store.local import scan

    bundled = [item.row.name for item in rows if item.state == "bundled"]
    here = [item for item in rows if item.parts]
    sizes = {(part.repo, part.folder): part.size for item in here for part in item.parts}
    ours, total = {repo for repo, _ in sizes}, sum(sizes.values())
    others = [] if store is None else [item for item in scan(store.cache, store.manifests) if item.repo not in ours]
    where = str(store.cache.folder) if store else None
    if as_json:
        pairs = [_local_json(item) for item in here]
        others_json = {"repos": len(others), "bytes": sum(item.size for item in others)}
        known = {"cache": where, "pairs": pairs, "total_bytes": total, "other": others_json, "bundled": bundled}
        console.json({**known, "gguf": [{**asdict(file), "path": str(file.path)} for file in files]})
        return
    if not here:
        console.data(f"No pair is in {where or 'any cache: there is no home folder'}; dflash pull MODEL fetches one.")
    else:
        console.lines(table(LOCAL, [cells for item in here for cells in _local_rows(item)], console.columns))
        packages = sum(item.target.size for item in here if item.target is not None and item.of_package)
        lines = [f"{amount(total - packages)} in {where}"] if total > packages else []
        lines += [f"{amount(packages)} in {store.packages}"] if packages and store else []
        console.lines(["", *lines])
    if bundled:
        console.data(f"with the package: {', '.join(bundled)}")
    if others:
        size = amount(sum(item.size for item in others))
        console.data(f"besides, {size} in {len(others)} repositories that belong to no pair of the registry")
    if files:
        cells = [(file.name, amount(file.size), file.program, str(file.path)) for file in files]
        console.lines(["", *table(GGUF, cells, console.columns)])
        console.data("dflash plan PATH says whether a drafter is known for one; dflash chat PATH talks to it")


def _local_rows(item: InstallStatus) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    parts = [(item.row.name, "target", item.target)]
    if item.row.drafter is not None:
        parts.append((f"  {item.drafter.repo if item.drafter else item.row.drafter.id}", "drafter", item.drafter))
    parts += [(f"  {variant.model}", "variant", part) for variant, part in item.variants]
    for shown, name, part in parts:
        if part is None:
            lines.append((shown, name, "-", "-", "-", "not here"))
            continue
        commit = part.commit[:12] or "-"
        lines.append((shown, name, amount(part.size), commit, VERIFIED[part.verified], _state(part)))
    return lines


def _state(part: Local) -> str:
    if part.problem:
        return part.problem
    if part.missing:
        return f"{len(part.missing)} file{'s' if len(part.missing) != 1 else ''} missing"
    return part.notice or "complete"


def _local_json(item: InstallStatus) -> dict[str, Any]:
    return {
        "name": item.row.name,
        "state": item.state,
        "verified": item.verified,
        "bytes": item.size,
        "gib": in_gib(item.size),
        "target": _part_json(item.target),
        "drafter": _part_json(item.drafter),
        "variants": {variant.model: _part_json(part) for variant, part in item.variants},
    }


def _part_json(part: Local | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {
        "repo": part.repo,
        "commit": part.commit,
        "folder": str(part.folder),
        "bytes": part.size,
        "files": len(part.files),
        "missing": list(part.missing),
        "verified": part.verified,
        "notice": part.notice or part.problem or None,
    }
