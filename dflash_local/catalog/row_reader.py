"""From a strict YAML tree to typed rows: which keys there are, and what each may hold."""

from __future__ import annotations

import re
import shlex
from typing import cast, get_args

from dflash_local.catalog import yaml_values as read
from dflash_local.catalog.repo_id import check_repo_id
from dflash_local.catalog.row import (
    Fingerprint,
    Kind,
    Launch,
    Published,
    Repo,
    Row,
    RunsOn,
    Server,
    Status,
    Thinking,
    Variant,
)
from dflash_local.catalog.yaml_reader import Node
from dflash_local.errors import UsageError

ROW = (
    *("target", "drafter", "bundled", "aliases", "mirrors", "family", "kind", "status", "revisions", "fingerprints"),
    *("thinking", "gated", "licence", "drafter_licence", "sizes_gib", "context", "variants", "runs_on", "server"),
    *("published", "acceptance_band", "notes"),
)
FINGERPRINT = ("generation", "layers", "taps", "mask_token_id", "block_size", "window", "revision")
VARIANT = ("repo", "format", "name", "size_gib", "revision", "group_size", "kept_16_bits", "licence", "note")
SERVER = ("tensor_parallel", "vllm", "sglang", "note")
LAUNCH = ("command", "environment")
PUBLISHED = ("source", "generation", "tasks")
CELLS = ("acceptance_length", "speedup", "tokens_per_s", "plain_tokens_per_s")
ROLES = ("target", "drafter")
# Keys of a row, then where the others belong, so that a misplaced key is told its place.
ROW_KEYS = {
    **dict.fromkeys(FINGERPRINT, "fingerprints"),
    **dict.fromkeys(VARIANT, "variants"),
    **dict.fromkeys(SERVER, "server"),
    **dict.fromkeys(CELLS, "published"),
    **dict.fromkeys(ROW, ""),
}

MIN_BLOCK, MAX_BLOCK = 2, 64
MAX_CONTEXT = 2**30
MAX_GIB = 1e6
MAX_GROUP = 2**16
COMMIT = re.compile(r"[0-9a-f]{40}")
BRANCH = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]*[A-Za-z0-9_])?")
ALIAS = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def row(node: Node, *, overridden: bool = False) -> Row:
    """One row.

    Raises:
        SettingsError: naming file, line, key and what is allowed.
    """
    fields = read.mapping(node, ROW_KEYS, "a pair")
    revisions = _by_role(fields.get("revisions"), "revisions")
    sizes = _by_role(fields.get("sizes_gib"), "sizes_gib")
    target = _repo(fields.get("target"), "target", revisions.get("target"))
    drafter = _repo(fields.get("drafter"), "drafter", revisions.get("drafter"))
    bundled = _name(fields.get("bundled"), "bundled")
    if (target is None) == (bundled is None):
        node.fail("a pair has either a target or the name of a bundled pair", "give 'target: owner/name'")
    status = cast(Status, read.choice(fields.get("status"), "status", get_args(Status), "released"))
    if target is not None and drafter is None and status != "announced":
        node.fail(f"{target.id} has no drafter", "give 'drafter: owner/name', or 'status: announced'")
    return Row(
        name=target.id if target is not None else str(bundled),
        target=target,
        drafter=drafter,
        bundled=bundled,
        aliases=tuple(filter(None, (_name(item, "aliases") for item in read.items(fields.get("aliases"), "aliases")))),
        mirrors=tuple(_repo_id(item, "mirrors") for item in read.items(fields.get("mirrors"), "mirrors")),
        family=read.text(fields.get("family"), "family") or "",
        kind=cast(Kind, read.choice(fields.get("kind"), "kind", get_args(Kind), "dflash")),
        status=status,
        fingerprints=tuple(_fingerprint(item) for item in read.items(fields.get("fingerprints"), "fingerprints")),
        thinking=cast("Thinking | None", read.choice(fields.get("thinking"), "thinking", get_args(Thinking), None)),
        gated=read.flag(fields.get("gated"), "gated"),
        licence=read.text(fields.get("licence"), "licence"),
        drafter_licence=read.text(fields.get("drafter_licence"), "drafter_licence"),
        target_gib=read.number(sizes.get("target"), "sizes_gib.target", 0, MAX_GIB),
        drafter_gib=read.number(sizes.get("drafter"), "sizes_gib.drafter", 0, MAX_GIB),
        context=read.integer(fields.get("context"), "context", 1, MAX_CONTEXT),
        variants=_variants(fields.get("variants")),
        runs_on=cast(RunsOn, read.choice(fields.get("runs_on"), "runs_on", get_args(RunsOn), "local")),
        server=_server(fields.get("server")),
        published=tuple(cell for table in read.items(fields.get("published"), "published") for cell in _cells(table)),
        notes=read.text(fields.get("notes"), "notes") or "",
        acceptance_band=read.number(fields.get("acceptance_band"), "acceptance_band", 1, MAX_BLOCK),
        overridden=overridden,
    )


def key_of(node: Node) -> str:
    """What a pair is known by, in lower case: its target or bundled name; "" when it has neither."""
    fields = node.value if isinstance(node.value, dict) else {}
    for name in ("target", "bundled"):
        found = fields.get(name)
        if found is not None and isinstance(found.value, str) and not read.is_null(found):
            return found.value.lower()
    return ""


def _required(node: Node, fields: dict[str, Node], key: str) -> Node:
    return fields[key] if key in fields else node.fail(f"key {key!r} is missing")


def _by_role(node: Node | None, what: str) -> dict[str, Node]:
    return {} if node is None or read.is_null(node) else read.mapping(node, ROLES, what)


def _repo(node: Node | None, what: str, revision: Node | None) -> Repo | None:
    if node is None or read.is_null(node):
        return None
    return Repo(_repo_id(node, what), _revision(revision, f"revisions.{what}"))


def _repo_id(node: Node, what: str) -> str:
    value = read.text(node, what)
    try:
        return check_repo_id(value or "")
    except UsageError as error:
        node.fail(f"{what}: {error.message}", error.hint)


def _revision(node: Node | None, what: str) -> str | None:
    """A commit, a branch or null; pulling records the commit it became."""
    value = read.text(node, what)
    if value is None or node is None:
        return None
    branch = BRANCH.fullmatch(value) and len(value) <= 96 and ".." not in value and "//" not in value
    if not COMMIT.fullmatch(value) and not branch:
        node.fail(f"{what}: {read.shown(value)} is not a revision", "allowed: 40 hexadecimal digits, a branch, or null")
    return value


def _name(node: Node | None, what: str) -> str | None:
    value = read.text(node, what)
    if node is not None and value is not None and not ALIAS.fullmatch(value):
        node.fail(f"{what}: {read.shown(value)} is not a name", "allowed: letters, digits, '-', '_' and '.'")
    return value


def _fingerprint(node: Node) -> Fingerprint:
    fields = read.mapping(node, FINGERPRINT, "fingerprints")
    taps = fields.get("taps")
    known_taps = tuple(_integer(item, "taps", 0, 1023) for item in read.items(taps, "taps"))
    return Fingerprint(
        generation=read.text(fields.get("generation"), "generation"),
        layers=read.integer(fields.get("layers"), "layers", 1, 128),
        taps=None if read.is_null(taps) else known_taps,
        mask_token_id=read.integer(fields.get("mask_token_id"), "mask_token_id", 0, 2**23),
        block_size=read.integer(fields.get("block_size"), "block_size", MIN_BLOCK, MAX_BLOCK),
        window=read.integer(fields.get("window"), "window", 1, 2**24),
        revision=_revision(fields.get("revision"), "fingerprints.revision"),
    )


def _integer(node: Node, what: str, low: int, high: int) -> int:
    value = read.integer(node, what, low, high)
    return node.fail(f"{what} holds null", f"allowed: whole numbers from {low} to {high}") if value is None else value


def _variants(node: Node | None) -> tuple[Variant, ...]:
    """The variants, each with a name of its own."""
    found: dict[str, Variant] = {}
    for item in read.items(node, "variants"):
        variant = _variant(item)
        if found.setdefault(variant.name.lower(), variant) is not variant:
            item.fail(f"two variants are called {variant.name!r}", "give one of them another 'name'")
    return tuple(found.values())


def _variant(node: Node) -> Variant:
    fields = read.mapping(node, VARIANT, "variants")
    format_ = _name(_required(node, fields, "format"), "variants.format") or ""
    return Variant(
        repo=_repo_id(_required(node, fields, "repo"), "variants.repo"),
        format=format_,
        name=_name(fields.get("name"), "variants.name") or format_,
        licence=read.text(fields.get("licence"), "variants.licence"),
        size_gib=read.number(fields.get("size_gib"), "size_gib", 0, MAX_GIB),
        revision=_revision(fields.get("revision"), "variants.revision"),
        group_size=read.integer(fields.get("group_size"), "group_size", 1, MAX_GROUP),
        kept_16_bits=_kept(fields.get("kept_16_bits")),
        note=read.text(fields.get("note"), "note") or "",
    )


def _kept(node: Node | None) -> tuple[str, ...] | None:
    """Parts of a model by name; a missing list is not known, an empty one says that there are none."""
    if node is None or read.is_null(node):
        return None
    return tuple(_name(item, "kept_16_bits") or "" for item in read.items(node, "kept_16_bits"))


def _server(node: Node | None) -> Server | None:
    if node is None or read.is_null(node):
        return None
    fields = read.mapping(node, SERVER, "server")
    return Server(
        tensor_parallel=read.integer(fields.get("tensor_parallel"), "tensor_parallel", 1, 1024),
        vllm=_launch(fields.get("vllm"), "vllm"),
        sglang=_launch(fields.get("sglang"), "sglang"),
        note=read.text(fields.get("note"), "note") or "",
    )


def _launch(node: Node | None, what: str) -> Launch | None:
    if node is None or read.is_null(node):
        return None
    fields = read.mapping(node, LAUNCH, what)
    command = _required(node, fields, "command")
    try:
        flags = tuple(shlex.split(read.text(command, f"{what}.command") or ""))
    except ValueError as error:
        command.fail(f"{what}.command: {error}", "close the quotes")
    if not {"TARGET", "DRAFTER"} <= set(re.findall("TARGET|DRAFTER", " ".join(flags))):
        command.fail(f"{what}.command names no TARGET or no DRAFTER", "write both words where the repositories go")
    environment: dict[str, str] = {}
    variables = fields.get("environment")
    if variables is not None and not read.is_null(variables):
        for name, value in read.mapping(variables, None, "environment").items():
            if not VARIABLE.fullmatch(name):
                value.fail(f"environment: {read.shown(name)} is not the name of a variable")
            environment[name] = read.text(value, name) or ""
    return Launch(flags, environment)


def _cells(node: Node) -> list[Published]:
    """One published table: task -> block -> acceptance length, and per concurrency the speeds."""
    fields = read.mapping(node, PUBLISHED, "published")
    source = read.text(fields.get("source"), "source")
    generation = read.text(fields.get("generation"), "generation")
    if not source or not generation:
        node.fail("published: source and generation are required", "say which card, hardware and drafter generation")
    cells = []
    for task, blocks in read.mapping(_required(node, fields, "tasks"), None, "tasks").items():
        for size, cell in read.mapping(blocks, None, task).items():
            block = _integer(Node(size, cell.file, cell.line, plain=True), "block size", MIN_BLOCK, MAX_BLOCK)
            cells += _by_concurrency(cell, _task(task, blocks), block, generation, source)
    return cells


def _task(task: str, node: Node) -> str:
    """The task's name, refused when it could not be shown as it is."""
    if not task.isprintable() or not task.strip() or len(task) > 40:
        node.fail(f"published: {read.shown(task)} is not the name of a task")
    return task


def _by_concurrency(node: Node, task: str, block: int, generation: str, source: str) -> list[Published]:
    fields = read.mapping(node, CELLS, f"{task}, block {block}")
    accepted = read.number(fields.get("acceptance_length"), "acceptance_length", 1, MAX_BLOCK)
    speeds = {name: _figures(fields.get(name), name) for name in CELLS[1:]}
    found = sorted({concurrency for figures in speeds.values() for concurrency in figures}) or [1]
    return [
        Published(
            task=task,
            block=block,
            generation=generation,
            concurrency=concurrency,
            # Cards give it for single requests; what others run beside does not change it.
            acceptance_length=accepted,
            speedup=speeds["speedup"].get(concurrency),
            tokens_per_s=speeds["tokens_per_s"].get(concurrency),
            source=source,
            plain_tokens_per_s=speeds["plain_tokens_per_s"].get(concurrency),
        )
        for concurrency in found
    ]


def _figures(node: Node | None, what: str) -> dict[int, float]:
    """Concurrency -> figure."""
    if node is None or read.is_null(node):
        return {}
    figures = {}
    for name, value in read.mapping(node, None, what).items():
        concurrency = _integer(Node(name, value.file, value.line, plain=True), "concurrency", 1, 65536)
        figure = read.number(value, what, 0, 1e7)
        if figure is not None:
            figures[concurrency] = figure
    return figures
