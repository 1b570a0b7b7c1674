"""``dflash bench``: AR against DFlash over prompts or tasks, here or on a server; a quantised target, its original."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app.examples import HELD_OUT
from dflash_local.app.resolve import choose
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.measuring import Report, check_report_path, conclude
from dflash_local.cli.random_bench import RandomOptions, random_bench
from dflash_local.cli.server_bench import ServerBench, server_bench
from dflash_local.cli.task_bench import TaskBench, check_limit, task_bench
from dflash_local.config.quantizers import USUAL
from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.request import MAX_NEW_TOKENS, check_integer

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt

TOKENS = 256
ALONE = LoadConfig(draft=False)
RANDOM_KNOWS = ("engine", "dtype", "device", "context", "drafter_precision", "exact")  # of the load options

Contexts = Annotated[
    list[int] | None,
    opt.named("--context", "N", "Tokens the session may hold; with random weights tokens committed, repeatable."),
]
Prompts = Annotated[
    str | None, opt.named("--prompts", "heldout|builtin|FILE.jsonl", "heldout for bundled pairs, else builtin.")
]
Tokens = Annotated[int | None, opt.named("--max-new-tokens", "N", f"Tokens in a reply at most; {TOKENS} if not given.")]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="real|random|random:FORMAT",
        help="random: the pair's shapes on this GPU, without a download; times only. "
        f"FORMAT: of a quantised target, {' '.join(USUAL)}.",
    ),
]
BlockSizes = Annotated[
    list[int] | None,
    opt.named("--block-size", "B", "Anchor and drafts per cycle; trained size if not given; with --tasks repeatable."),
]
Prefill = Annotated[int | None, opt.named("--prefill", "N", "Random weights: tokens of a prompt to time, 0 for none.")]
AcceptanceLengths = Annotated[
    str | None, opt.named("--acceptance", "3,5,7", "Random weights: tokens per cycle to project tok/s at.")
]
Baselines = Annotated[
    bool, typer.Option("--baselines", help="Random weights: transformers and the reference engine beside it.")
]
Routing = Annotated[
    str | None,
    typer.Option(
        "--routing",
        metavar="uniform|correlated",
        help="Random weights of a mixture: each row's experts drawn by themselves (the worst case, the default), or "
        "all rows' among k * rows^0.75.",
    ),
]
Fidelity = Annotated[
    bool, typer.Option("--fidelity", help="Instead: how near a quantised target's choices are to its original's.")
]
Original = Annotated[
    str | None, opt.named("--original", "MODEL", "With --fidelity: the original, where the registry names none.")
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="gsm8k,math500,...",
        help="Instead: tasks of the model cards, gsm8k math500 humaneval mbpp mt-bench alpaca; results are kept.",
    ),
]
Resume = Annotated[
    bool | None,
    typer.Option("--resume/--no-resume", help="With --tasks or --url: go on where an earlier run ended; usual."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="With --tasks or --url: where results go, a line a prompt."),
]
AcceptNewData = Annotated[
    bool, typer.Option("--accept-new-data", help="With --tasks: take the data as the Hub has them now.")
]


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
    """Measure speed and acceptance with and without drafting. Writes what --report, --tasks and --url keep."""
    call = Invocation.begin()
    stored, blocks = _stored_format(weights), tuple(dict.fromkeys(block_size or ()))
    load = served.checked(load)
    if weights != "real":
        _refuse("random", prompts=prompts, limit=limit, max_new_tokens=max_new_tokens, think=think)
        _refuse("random", fidelity=fidelity or None, original=original, tasks=tasks, url=served.url)
        if served.program is not None:
            raise UsageError(f"--engine {served.program} does not go with --weights random", "leave one out")
        _refuse_load_options(load, call.user.load_config)
        contexts = tuple(context or ())
        if len(blocks) > 1:
            raise UsageError("--block-size is given more than once", "several go with --tasks")
        block = blocks[0] if blocks else None
        options = RandomOptions(
            *(load, drafter, contexts, block, prefill, acceptance, baselines, report, as_json, stored, routing)
        )
        return random_bench(model, options, call.user, call.console)
    _refuse("real", prefill=prefill, acceptance=acceptance, baselines=baselines or None, routing=routing)
    if fidelity and blocks:
        raise UsageError("--block-size does not go with --fidelity", "leave it out: nothing is drafted there")
    if original is not None and not fidelity:
        raise UsageError("--original says what a quantised target is compared with", "it goes with --fidelity")
    asked = TaskBench(tasks, limit, max_new_tokens, blocks, resume, accept_new_data, out)
    asked.check(fidelity, prompts, served.used)
    if len(context or ()) > 1:
        raise UsageError("--context is given more than once", "several go with --weights random")
    load = replace(load, context=context[0]) if context else load
    length = TOKENS if max_new_tokens is None else max_new_tokens
    check_integer("max_new_tokens", length, 1, MAX_NEW_TOKENS)
    check_report_path(report)
    if served.used:
        found, lines = server_bench(call, served, (model, drafter), load, asked, think, partial(_chosen, name=prompts))
        return conclude(call.console, found, lines, as_json, report)
    pair = call.pair(model, drafter, replace(load, draft=not fidelity))
    thinking = call.thinks(pair, think)
    if tasks is not None:
        found, lines = task_bench(call, choose(model, drafter, call.user).drafter_row, pair, load, asked, thinking)
        return conclude(call.console, found, lines, as_json, report)
    check_limit(limit)
    chosen = _chosen(pair, prompts)[1][:limit]
    if fidelity:
        other = original_of(call, model, pair, original, load)
        found, lines = measure_fidelity(call, pair, other, load, chosen, length, thinking)
    else:
        found, lines = _compare(call, pair, load, chosen, length, blocks[0] if blocks else None, thinking)
    conclude(call.console, found, lines, as_json, report)


def _stored_format(weights: str) -> str | None:
    """The format of a random target's weights; None for plain ones, and for a real target."""
    kind, colon, stored = weights.partition(":")
    if kind not in ("real", "random") or (colon and (kind == "real" or stored not in USUAL)):
        known = ", ".join(("real", "random", *(f"random:{name}" for name in USUAL)))
        raise UsageError(f"--weights {weights} is not known", f"one of {known}")
    return stored or None


def _refuse(weights: str, **given: object) -> None:
    """Options that say nothing about such weights."""
    for name, value in given.items():
        if value is not None:
            other = "real" if weights == "random" else "random"
            raise UsageError(f"--{name.replace('_', '-')} does not go with --weights {weights}", f"--weights {other}")


def _refuse_load_options(load: LoadConfig, usual: LoadConfig) -> None:
    """Of the load options random weights know a few; others than the user's settings say nothing about them."""
    if load.engine == "reference" and usual.engine != "reference":
        raise UsageError("--weights random measures the fused engine", "--baselines adds the reference engine")
    for name, option in LOAD_OPTIONS.items():
        if name not in RANDOM_KNOWS and getattr(load, name) != getattr(usual, name):
            _refuse("random", **{option.flag.removeprefix("--"): True})


def _compare(
    call: Invocation,
    pair: Pair,
    load: LoadConfig,
    prompts: tuple[Prompt, ...],
    max_new_tokens: int,
    block_size: int | None,
    thinking: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Load the pair and write every reply both ways: the report and its lines."""
    with call.session(pair, load) as session:
        from dflash_local.bench import speed

        with call.console.progress() as line:
            options = speed.SpeedOptions(max_new_tokens, block_size, thinking, progress=line)
            found = speed.compare(session, prompts, options)
    report = speed.speed_report(pair, session.facts, found, options)
    return report, speed.speed_lines(pair, session.facts, found, options)


def _chosen(pair: Pair, name: str | None) -> tuple[str, tuple[Prompt, ...]]:
    """The prompts to run, and their name; a toy knows only what it was taught, so its own are held out ones."""
    from dflash_local.bench import prompts

    name = name or ("heldout" if pair.toy else "builtin")
    if name == "heldout":
        return name, prompts.held_out(HELD_OUT)
    if name == "builtin":
        return name, prompts.built_in()
    file = Path(name).expanduser()
    return file.name, prompts.from_file(file)


def original_of(call: Invocation, model: str, pair: Pair, named: str | None, load: LoadConfig) -> Pair:
    """The plain target that a quantised one was made of: itself, before it was rounded; or another.

    Args:
        named: with ``--original``.

    Raises:
        UsageError: nothing tells which. DownloadError: it is not on this machine.
    """
    if named is not None:
        return call.pair(named, None, ALONE)
    if load.quantize is not None:
        return pair
    choice = choose(model, None, call.user)
    if choice.row is None or choice.row.target is None or choice.target == choice.row.target:
        raise UsageError(
            f"{pair.name} is not known as a quantised target",
            "give --quantize, or a quantised checkpoint with --original MODEL",
        )
    return call.pair(choice.row.name, None, ALONE)


def measure_fidelity(
    call: Invocation,
    pair: Pair,
    original: Pair,
    load: LoadConfig,
    prompts: tuple[Prompt, ...],
    max_new_tokens: int,
    thinking: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Load the original, then the quantised target, both without a drafter: how far apart they are, and its lines."""
    alone = replace(load, draft=False)
    with call.session(original, replace(alone, quantize=None)) as session:
        from dflash_local.bench import fidelity

        with call.console.progress() as line:
            texts = fidelity.score_original(session, prompts, max_new_tokens, thinking, line)
        before = session.facts
    del session
    fidelity.give_back()
    with call.session(pair, alone) as session:
        with call.console.progress() as line:
            found = fidelity.distances(session, texts, line)
        facts = session.facts
    report = fidelity.fidelity_report(pair, facts, original, before, texts, found)
    return report, fidelity.fidelity_lines(pair, facts, before, texts, found)
