"""``dflash bench``: AR against DFlash over a list of prompts, on this machine, in this run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local.app.examples import HELD_OUT
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.fidelity import Asked, measure_fidelity, original_of
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.cli.measuring import Report, check_report_path, save_report
from dflash_local.cli.random_bench import RandomOptions, random_bench
from dflash_local.config.quantizers import USUAL
from dflash_local.errors import UsageError
from dflash_local.load_config import LOAD_OPTIONS, LoadConfig
from dflash_local.request import MAX_BLOCK_SIZE, MAX_NEW_TOKENS, check_integer

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt

TOKENS = 256
MAX_LIMIT = 100_000
RANDOM_KNOWS = ("engine", "dtype", "device", "context", "drafter_precision")  # of the load options


Contexts = Annotated[
    list[int] | None,
    typer.Option(
        "--context", metavar="N", help="Tokens the session may hold; with random weights tokens committed, repeatable."
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option("--prompts", metavar="heldout|builtin|FILE.jsonl", help="heldout for bundled pairs, else builtin."),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N prompts.")]
Tokens = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="N", help=f"Tokens in a reply at most; {TOKENS} if not given.")
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="real|random|random:FORMAT",
        help="random: the pair's shapes on this GPU, without a download; times only. "
        f"FORMAT: of a quantised target, {' '.join(USUAL)}.",
    ),
]
Prefill = Annotated[
    int | None, typer.Option("--prefill", metavar="N", help="Random weights: tokens of a prompt to time, 0 for none.")
]
AcceptanceLengths = Annotated[
    str | None,
    typer.Option("--acceptance", metavar="3,5,7", help="Random weights: tokens per cycle to project tok/s at."),
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
    bool,
    typer.Option("--fidelity", help="Instead: how near a quantised target's choices are to its original's."),
]
Original = Annotated[
    str | None,
    typer.Option("--original", metavar="MODEL", help="With --fidelity: the original, where the registry names none."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "bench", bench)


def bench(
    model: opt.Model,
    drafter: opt.Drafter = None,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: Tokens = None,
    block_size: opt.BlockSize = None,
    context: Contexts = None,
    think: opt.Think = None,
    weights: Weights = "real",
    prefill: Prefill = None,
    acceptance: AcceptanceLengths = None,
    baselines: Baselines = False,
    routing: Routing = None,
    fidelity: Fidelity = False,
    original: Original = None,
    report: Report = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Measure speed and acceptance with and without drafting. Writes nothing unless --report is given."""
    call = Invocation.begin()
    user, console = call.user, call.console
    stored = _stored_format(weights)
    if weights != "real":
        _refuse("random", prompts=prompts, limit=limit, max_new_tokens=max_new_tokens, think=think)
        _refuse("random", fidelity=fidelity or None, original=original)
        _refuse_load_options(load, user.load_config)
        options = RandomOptions(
            load,
            drafter,
            tuple(context or ()),
            block_size,
            prefill,
            acceptance,
            baselines,
            report,
            as_json,
            stored,
            routing,
        )
        return random_bench(model, options, user, console)
    _refuse("real", prefill=prefill, acceptance=acceptance, baselines=baselines or None, routing=routing)
    if fidelity and block_size is not None:
        raise UsageError("--block-size does not go with --fidelity", "leave it out: nothing is drafted there")
    if original is not None and not fidelity:
        raise UsageError("--original says what a quantised target is compared with", "it goes with --fidelity")
    if len(context or ()) > 1:
        raise UsageError("--context is given more than once", "several go with --weights random")
    load = replace(load, context=context[0]) if context else load
    length = TOKENS if max_new_tokens is None else max_new_tokens
    check_integer("max_new_tokens", length, 1, MAX_NEW_TOKENS)
    if block_size is not None:
        check_integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
    pair = call.pair(model, drafter, replace(load, draft=not fidelity))
    check_report_path(report)
    chosen, thinking = _first(_chosen(pair, prompts), limit), call.thinks(pair, think)
    if fidelity:
        asked = Asked(chosen, length, thinking, report, as_json)
        return measure_fidelity(call, pair, original_of(call, model, pair, original, load), load, asked)
    _compare(call, pair, load, chosen, length, block_size, thinking, report, as_json)


def _stored_format(weights: str) -> str | None:
    """The format of a random target's weights; None for plain ones, and for a real target.

    Raises:
        UsageError: there are no such weights.
    """
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
    chosen: tuple[Prompt, ...],
    max_new_tokens: int,
    block_size: int | None,
    thinking: bool,
    report: Path | None,
    as_json: bool,
) -> None:
    """Load the pair, write every reply both ways, tell."""
    console = call.console
    with call.session(pair, load) as session:
        from dflash_local.bench import speed, speed_report

        with console.progress() as line:
            options = speed.SpeedOptions(max_new_tokens, block_size, thinking, line)
            found = speed.compare(session, chosen, options)
    result = speed_report.speed_report(pair, session.facts, found, options)
    if as_json:
        console.json(result)
    else:
        for text in speed_report.speed_lines(pair, session.facts, found, options):
            console.data(text)
    if report is not None:
        save_report(report, result, console)


def _first(prompts: tuple[Prompt, ...], limit: int | None) -> tuple[Prompt, ...]:
    if limit is not None:
        check_integer("limit", limit, 1, MAX_LIMIT)
    return prompts[:limit]


def _chosen(pair: Pair, name: str | None) -> tuple[Prompt, ...]:
    """The prompts to run; a toy knows only what it was taught, so its own are held out ones."""
    from dflash_local.bench import prompts

    if name == "heldout" or (name is None and pair.toy):
        return prompts.held_out(HELD_OUT)
    if name in (None, "builtin"):
        return prompts.built_in()
    return prompts.from_file(Path(str(name)).expanduser())
