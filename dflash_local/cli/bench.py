"""``dflash bench``: plain against DFlash over prompts or tasks, here or on a server; a quantised target too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dflash_local.app import measurements
from dflash_local.app.resolve import choose
from dflash_local.bench import prompts as lists
from dflash_local.bench.prompts import Prompt
from dflash_local.catalog.bundled import HELD_OUT, Pair
from dflash_local.cli import options as opt
from dflash_local.cli.help_pages import MORE
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.measuring import Report, check_path, conclude
from dflash_local.cli.server_options import Origin, TwoServerOptions, origin
from dflash_local.errors import UnknownModelError, UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.request import MAX_BLOCK_SIZE, MAX_NEW_TOKENS, check_integer

if TYPE_CHECKING:
    from dflash_local.app.model_sources import ServerModels
    from dflash_local.app.notices import Notify
    from dflash_local.app.task_bench import OpenServer, TaskBench
    from dflash_local.bench.report import Found
    from dflash_local.catalog.row import Published
    from dflash_local.settings import Settings

TOKENS, TASK_TOKENS = 256, 2048  # of a reply; of a task's, as the drafters' benchmark program has it
MOST = 32  # requests at a time
MAX_LIMIT = 100_000
MAX_LENGTHS = 3  # as many columns as eighty characters leave
ALONE = LoadConfig(draft=False)
RANDOM_KNOWS = ("engine", "dtype", "device", "context", "drafter_precision", "exact", "kv_cache", "prefill_chunk")

# What is measured, and the options that say something about it.
PROMPTS, TASKS, SERVER, FIDELITY, RANDOM = "prompts", "--tasks", "a server", "--fidelity", "--weights random"
KNOWN_BY = {
    "prompts": {PROMPTS, SERVER, FIDELITY},
    "limit": {PROMPTS, TASKS, SERVER, FIDELITY},
    "max_new_tokens": {PROMPTS, TASKS, SERVER, FIDELITY},
    "think": {PROMPTS, TASKS, SERVER, FIDELITY},
    "block_size": {PROMPTS, TASKS, RANDOM},
    "fidelity": {FIDELITY},
    "original": {FIDELITY},
    "tasks": {TASKS, SERVER},
    "resume": {TASKS, SERVER},
    "out": {TASKS, SERVER},
    "accept_new_data": {TASKS},
    "url": {SERVER},
    "plain_url": {SERVER},
    "engine_args": {SERVER},
    "concurrency": {SERVER},
    "prefill": {RANDOM},
    "acceptance": {RANDOM},
    "baselines": {RANDOM},
    "routing": {RANDOM},
}

Contexts = Annotated[
    list[int] | None,
    opt.named("--context", "N", "Tokens the session may hold; with random weights tokens committed, repeatable.", MORE),
]
Prompts = Annotated[
    str | None, opt.named("--prompts", "SET|FILE", "heldout, usual for bundled pairs, builtin or FILE.jsonl.")
]
Tokens = Annotated[int | None, opt.named("--max-new-tokens", "N", f"Tokens in a reply at most; {TOKENS} if not given.")]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="real|random|random:FORMAT",
        help="random: the pair's shapes, without a download; times only. FORMAT: of a quantised target, as int4-g128.",
    ),
]
BlockSizes = Annotated[
    list[int] | None,
    opt.named(
        "--block-size", "B", "Anchor and drafts per cycle; trained size if not given; with --tasks repeatable.", MORE
    ),
]
Prefill = Annotated[
    int | None, opt.named("--prefill", "N", "Random weights: tokens of a prompt to time, 0 for none.", MORE)
]
AcceptanceLengths = Annotated[
    str | None, opt.named("--acceptance", "3,5,7", "Random weights: tokens per cycle to project tok/s at.", MORE)
]
Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines", help="Random weights: transformers and the reference engine beside it.", rich_help_panel=MORE
    ),
]
Routing = Annotated[
    str | None,
    typer.Option(
        "--routing",
        metavar="uniform|correlated",
        help="Random weights of a mixture: each row's experts drawn by themselves (the worst case, the default), or "
        "all rows' among k * rows^0.75.",
        rich_help_panel=MORE,
    ),
]
Fidelity = Annotated[
    bool,
    typer.Option(
        "--fidelity",
        help="Instead: how near a target with coarser weights or caches is to its original.",
        rich_help_panel=MORE,
    ),
]
Original = Annotated[
    str | None, opt.named("--original", "MODEL", "With --fidelity: the original, where the registry names none.", MORE)
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="gsm8k,math500,...",
        help="Instead: tasks of model cards; also humaneval mbpp mt-bench alpaca. Results are kept.",
    ),
]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="With --tasks or --url: go on where an earlier run ended; usual.",
        rich_help_panel=MORE,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="With --tasks or --url: where results go, a line a prompt.",
        rich_help_panel=MORE,
    ),
]
AcceptNewData = Annotated[
    bool,
    typer.Option(
        "--accept-new-data", help="With --tasks: take the data as the Hub has them now.", rich_help_panel=MORE
    ),
]


@dataclass(frozen=True, slots=True)
class ServerBench(TwoServerOptions):
    """The options of a server as they were given."""

    concurrency: Annotated[
        str | None,
        opt.named("--concurrency", "1,4,16", f"Over a server: requests at a time, each 1 to {MOST}; 1.", MORE),
    ] = None

    @property
    def used(self) -> bool:
        """Whether replies come from a server."""
        return self.url is not None or self.program is not None

    def levels(self) -> tuple[int, ...]:
        """Return the numbers of requests at a time, each once, in the order given. UsageError: one that is none."""
        words = [word.strip() for word in (self.concurrency or "1").split(",")]
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) <= len(str(MOST)) and 1 <= int(word) <= MOST):
                raise UsageError(f"--concurrency: {word[:20]!r} is not 1 to {MOST}", "give numbers such as 1,4,16")
        return tuple(dict.fromkeys(map(int, words)))


EXAMPLES = ("dflash bench smollm2 --limit 4", "dflash bench Qwen/Qwen3.5-9B --weights random")


def bench(
    model: opt.Model,
    drafter: opt.Drafter = None,
    prompts: Prompts = None,
    limit: Annotated[int | None, opt.named("--limit", "N", "Only the first N prompts.")] = None,
    max_new_tokens: Tokens = None,
    block_size: BlockSizes = None,
    context: Contexts = None,
    think: opt.Think = None,
    weights: Weights = "real",
    prefill: Prefill = None,
    acceptance: AcceptanceLengths = None,
    baselines: Baselines = False,
    routing: Routing = None,
    fidelity: Fidelity = False,
    original: Original = None,
    tasks: Tasks = None,
    resume: Resume = None,
    out: Out = None,
    accept_new_data: AcceptNewData = False,
    *,
    served: ServerBench,
    report: Report = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Measure speed and acceptance with and without drafting."""
    given = locals() | {name: getattr(served, name) for name in ("url", "plain_url", "engine_args", "concurrency")}
    call = Invocation.begin()
    stored, blocks, contexts = _stored_format(weights), tuple(dict.fromkeys(block_size or ())), tuple(context or ())
    kinds = {RANDOM: weights != "real", FIDELITY: fidelity, SERVER: served.used, TASKS: tasks is not None}
    kind = next((name for name, asked_for in kinds.items() if asked_for), PROMPTS)
    _check(kind, given, served, blocks, contexts)
    if kind != SERVER and served.engine is not None:
        load = replace(load, engine=served.engine.value)
    levels, lengths = served.levels(), acceptance_lengths(acceptance)
    check_path("--report", report)
    length = (TOKENS if tasks is None else TASK_TOKENS) if max_new_tokens is None else max_new_tokens
    check_integer("max_new_tokens", length, 1, MAX_NEW_TOKENS)
    block = blocks[0] if blocks else None
    load = replace(load, context=contexts[0]) if contexts and kind != RANDOM else load
    asked = partial(_task_bench, call, (model, drafter), tasks, prompts, limit, accept_new_data, length, resume, out)
    if kind == RANDOM:
        _refuse_load_options(load, call.user.load_config)
        from dflash_local.app.random_bench import RandomOptions, bench_random  # `dflash --help` imports this module

        chosen = load, drafter, contexts, block, prefill, lengths, baselines, stored, routing
        options = RandomOptions(*chosen, columns=call.console.columns)
        found = call.measure(model, partial(bench_random, model, options))
    elif kind == SERVER:
        found = _over_servers(call, served, (model, drafter), load, levels, asked, think)
    else:
        pair = call.pair(model, drafter, replace(load, draft=kind != FIDELITY))
        thinking = call.thinks(pair, think)
        job: Callable[[Settings, Notify], Found]
        if kind == TASKS:
            from dflash_local.app.task_bench import bench_tasks

            job = partial(bench_tasks, pair, load, asked(pair, thinking), blocks)
        elif kind == FIDELITY:
            other = original_of(call, model, pair, original, load)
            chosen_prompts = _chosen(pair, prompts)[1][:limit]
            job = partial(measurements.bench_fidelity, pair, other, load, chosen_prompts, length, thinking)
        else:
            chosen_prompts = _chosen(pair, prompts)[1][:limit]
            job = partial(measurements.bench_pair, pair, load, chosen_prompts, length, block, thinking)
        found = call.measure(pair.name, job)
    conclude(call, found, as_json, report)


def _check(
    kind: str, given: dict[str, Any], served: ServerBench, blocks: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    """Refuse options that say nothing about what is measured, or that do not go together."""
    for name, known_by in KNOWN_BY.items():
        value = given[name]
        if name == "accept_new_data" and given["tasks"] is not None:
            known_by = {*known_by, SERVER}
        if value is None or (value is False and name != "resume") or kind in known_by:
            continue
        option = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        others = [each for each in (PROMPTS, TASKS, SERVER, FIDELITY, RANDOM) if each in known_by]
        raise UsageError(f"{option} does not go with {kind}", f"it goes with {' and '.join(others)}")
    if given["tasks"] is not None and given["prompts"] is not None:
        raise UsageError("--tasks does not go with --prompts", "give one of them")
    if served.plain_url is not None and served.url is None:
        raise UsageError("--plain-url is for --url", "give the server that drafts with --url")
    if kind != SERVER and served.program is not None:
        raise UsageError(f"--engine {served.program} does not go with {kind}", "leave one out")
    for name, values, several in (("block-size", blocks, TASKS), ("context", contexts, RANDOM)):
        if len(values) > 1 and kind != several:
            raise UsageError(f"--{name} is given more than once", f"several go with {several}")
    for size in () if kind == RANDOM else blocks:
        check_integer("block_size", size, 1, MAX_BLOCK_SIZE)
    if given["limit"] is not None:
        check_integer("limit", given["limit"], 1, MAX_LIMIT)


def _stored_format(weights: str) -> str | None:
    """Name the format of a random target's weights; None for plain ones, and for a real target."""
    kind, colon, stored = weights.partition(":")
    from dflash_local.config.quantizers import USUAL

    if kind not in ("real", "random") or (colon and (kind == "real" or stored not in USUAL)):
        known = ", ".join(("real", "random", *(f"random:{name}" for name in USUAL)))
        raise UsageError(f"--weights {weights} is not known", f"one of {known}")
    return stored or None


def _refuse_load_options(load: LoadConfig, usual: LoadConfig) -> None:
    """Refuse load options that say nothing about random weights; those of the user's settings are passed over."""
    if load.engine == "reference" and usual.engine != "reference":
        raise UsageError("--weights random measures the fused engine", "--baselines adds the reference engine")
    for name, option in LOAD_OPTIONS.items():
        if name not in RANDOM_KNOWS and getattr(load, name) != getattr(usual, name):
            raise UsageError(f"{option.flag} does not go with --weights random", "leave it out")


def acceptance_lengths(text: str | None) -> tuple[float, ...]:
    """Read tokens per cycle from ``3,5,7``; UsageError where an entry is not a number of at least 1."""
    if text is None:
        return ()
    found = []
    for word in text.split(","):
        try:
            length = float(word)
        except ValueError:
            length = 0.0
        if not 1 <= length <= 1000:
            raise UsageError(f"--acceptance: {word.strip()!r} is not an acceptance length", "give such as 3,5,7")
        found.append(length)
    if len(found) > MAX_LENGTHS:
        raise UsageError(f"--acceptance: {len(found)} lengths are asked for", f"give at most {MAX_LENGTHS}")
    return tuple(dict.fromkeys(found))


def _chosen(pair: Pair, name: str | None) -> tuple[str, tuple[Prompt, ...]]:
    """Return the prompts to run, and their name; a toy knows only what it was taught, so its own are held out ones."""
    name = name or ("heldout" if pair.toy else "builtin")
    if name == "heldout":
        return name, lists.held_out(HELD_OUT)
    if name == "builtin":
        return name, lists.built_in()
    file = Path(name).expanduser()
    return file.name, lists.from_file(file)


def original_of(call: Invocation, model: str, pair: Pair, named: str | None, load: LoadConfig) -> Pair:
    """Find the plain target that a quantised one was made of: itself, before it was rounded, or with caches in 16 bits;
    or another.

    Args:
        named: with ``--original``.

    Raises:
        UsageError: nothing tells which. DownloadError: it is not on this machine.
    """
    if named is not None:
        return call.pair(named, None, ALONE)
    if load.quantize is not None or load.kv_cache != "auto":
        return pair
    choice = choose(model, None, call.user)
    if choice.row is None or choice.row.target is None or choice.target == choice.row.target:
        raise UsageError(
            f"{pair.name} is not known as a quantised target",
            "give --quantize or --kv-cache, or a quantised checkpoint with --original MODEL",
        )
    return call.pair(choice.row.name, None, ALONE)


def _task_bench(
    call: Invocation,
    named: tuple[str, str | None],
    tasks: str | None,
    prompts: str | None,
    limit: int | None,
    accept_new_data: bool,
    max_new_tokens: int,
    resume: bool | None,
    out: Path | None,
    pair: Pair,
    thinking: bool,
) -> TaskBench:
    """Gather what tasks, or prompts over a server, are measured with. UsageError: results can be kept nowhere."""
    from dflash_local.app.task_bench import TaskBench, TaskOptions, fetch_subjects, prompts_subject

    folder = out.expanduser() if out is not None else call.user.data_dir and call.user.data_dir / "bench"
    if folder is None:
        raise UsageError("there is no home folder to keep results in", "name a folder with --out")
    if tasks is None:
        subjects = [prompts_subject(*_chosen(pair, prompts), limit)]
    else:
        subjects = fetch_subjects(tasks, limit, accept_new_data, call.user, call.console.notify)
    options = TaskOptions(max_new_tokens, thinking)
    return TaskBench(tuple(subjects), options, folder, resume is False, _published(call, *named))


def _published(call: Invocation, model: str, drafter: str | None) -> tuple[Published, ...]:
    """Return what the registry has of the pair; nothing of one that only a server knows."""
    try:
        row = choose(model, drafter, call.user, draft=False).drafter_row
    except UnknownModelError:
        return ()
    return tuple(row.published) if row is not None else ()


def _over_servers(
    call: Invocation,
    served: ServerBench,
    named: tuple[str, str | None],
    load: LoadConfig,
    levels: tuple[int, ...],
    asked: partial[TaskBench],
    think: bool | None,
) -> Found:
    """Answer tasks or prompts by servers. ``named``: model and drafter."""
    from dflash_local.app.task_bench import bench_servers

    source = origin(call, *named, load, served)
    pair = source.pair
    what = asked(pair, call.thinks(pair, think))
    servers = _servers(call, served, source)
    with call.console.progress() as line:
        return bench_servers(pair, named[1], servers, levels, what, call.console.notify, line)


def _servers(call: Invocation, served: ServerBench, source: Origin) -> list[OpenServer]:
    """Open the server that drafts and then the plain one, where there is one; launched ones are launched when opened.

    Raises:
        UsageError: one of them is what the other should be. DFlashError: one that runs does not answer.
    """
    servers, pair, notify = cast("ServerModels", source.models), source.pair, call.console.notify
    if served.url is None:
        return [lambda drafts=drafts: closing(servers.open_compared(pair, drafts, notify)) for drafts in (True, False)]  # type: ignore[misc]
    if served.plain_url is not None:
        running = list(servers.both(pair, notify).servers)
    else:
        running = [servers.open_compared(pair, True, notify)]
    return [partial(closing, server) for server in running]
