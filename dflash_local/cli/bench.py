"""``dflash bench``: AR against DFlash over a list of prompts, on this machine, in this run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_local import settings
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.measuring import HELD_OUT, Report, check_report_path, loaded_engine, save_report
from dflash_local.cli.resolve import resolve
from dflash_local.cli.session import load_wish
from dflash_local.cli.thinking import thinks
from dflash_local.request import MAX_BLOCK_SIZE, MAX_NEW_TOKENS, check_integer

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt

TOKENS = 256
MAX_LIMIT = 100_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


def bench(
    model: opt.Model,
    drafter: opt.Drafter = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="heldout|builtin|FILE.jsonl", help="heldout for bundled pairs, else builtin."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Only the first N prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens in a reply at most.")] = TOKENS,
    block_size: opt.BlockSize = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    engine: opt.Engine = None,
    quantize: opt.Quantize = None,
    context: opt.Context = None,
    no_fit_check: opt.NoFitCheck = False,
    allow_mismatch: opt.AllowMismatch = False,
    think: opt.Think = None,
    report: Report = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure speed and acceptance with and without drafting. Writes nothing unless --report is given."""
    user = settings.load()
    console = Console(user.environ)
    check_integer("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
    if block_size is not None:
        check_integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
    pair = resolve(model, drafter, user, console, allow_mismatch=allow_mismatch)
    check_report_path(report)
    chosen = _chosen(pair, prompts)
    if limit is not None:
        check_integer("limit", limit, 1, MAX_LIMIT)
        chosen = chosen[:limit]
    wish = load_wish(user, dtype=dtype, device=device, engine=engine, quantize=quantize, allow_mismatch=allow_mismatch)
    wish = replace(wish, context=context, fit_check=not no_fit_check)
    thinking = thinks(pair, think, user, console)
    with loaded_engine(pair, wish, console) as session:
        from dflash_local.bench import speed, speed_report

        with console.progress() as line:
            asked = speed.Wish(max_new_tokens, block_size, thinking, line)
            found = speed.compare(session, chosen, asked)
    result = speed_report.speed_report(pair, session.facts, found, asked)
    if as_json:
        console.json(result)
    else:
        for text in speed_report.speed_lines(pair, session.facts, found, asked):
            console.data(text)
    if report is not None:
        save_report(report, result, console)


def _chosen(pair: Pair, name: str | None) -> tuple[Prompt, ...]:
    """The prompts asked for; a toy knows only what it was taught, so its own are held out ones."""
    from dflash_local.bench import prompts

    if name == "heldout" or (name is None and pair.toy):
        return prompts.held_out(HELD_OUT)
    if name in (None, "builtin"):
        return prompts.built_in()
    return prompts.from_file(Path(str(name)).expanduser())
