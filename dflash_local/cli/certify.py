"""``dflash certify``: is the text the target's own? Runs it both ways, says so, and writes the evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app.examples import bench_prompts
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.cli.measuring import Report, check_report_path, save_report
from dflash_local.errors import ExactnessError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.request import MAX_NEW_TOKENS, check_integer, fresh_seed

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt
    from dflash_local.engine.session import Session

TOKENS = 128


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "certify", certify)


def certify(
    model: opt.Model,
    drafter: opt.Drafter = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; repeatable.")] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option("--prompt-ids", metavar="1,2,3", help="A prompt as token ids; repeatable.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Tokens in a reply at most.")
    ] = TOKENS,
    block_size: Annotated[
        list[int] | None,
        typer.Option("--block-size", metavar="B", help="Block size; repeatable; trained size if not given."),
    ] = None,
    planted: Annotated[
        bool,
        typer.Option("--planted", help="Draft AR's own text with mistakes: every acceptance length occurs."),
    ] = False,
    seed: opt.Seed = None,
    think: opt.Think = None,
    report: Report = None,
    as_json: opt.Json = False,
    json_progress: Annotated[
        bool, typer.Option("--json-progress", help="Print progress as JSON lines, too.", hidden=True)
    ] = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Compare replies with and without drafting, greedy and sampled; exit 7 when the engine is at fault."""
    call = Invocation.begin()
    check_integer("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
    console = call.console
    console.json_progress = json_progress
    pair = call.pair(model, drafter, load)
    check_report_path(report)
    thinking = call.thinks(pair, think)
    with call.session(pair, load) as session:
        prompts = _prompts(pair, session, prompt or [], prompt_ids or [])
        seed = fresh_seed() if seed is None else seed
        trials = _Trials(prompts, thinking, tuple(block_size or ()), max_new_tokens, planted)
        found, lines, failed = _certify(console, pair, session, trials, seed)
    if as_json:
        console.json(found)
    else:
        for line in lines:
            console.data(line)
    if report is not None:
        save_report(report, found, console)
    if failed:
        raise ExactnessError(*failed)


def _prompts(pair: Pair, session: Session, texts: list[str], ids: list[str]) -> tuple[Prompt, ...]:
    """What the user gave, else a few of those held out with a bundled pair, else the built-in ones."""
    from dflash_local.bench.prompts import Prompt

    given = [Prompt("given", text=text) for text in texts] + [Prompt("given", ids=opt.parse_ids(text)) for text in ids]
    if any(not text.strip() for text in texts):
        raise UsageError("--prompt is empty")
    if given:
        return tuple(given)
    return tuple(bench_prompts(pair))


@dataclass(frozen=True, slots=True)
class _Trials:
    """What is tried: see ``bench.certify.Plan``; no block sizes are the trained one."""

    prompts: tuple[Prompt, ...]
    thinking: bool
    blocks: tuple[int, ...]
    tokens: int
    planted: bool


def _certify(
    console: Console, pair: Pair, session: Session, trials: _Trials, seed: int
) -> tuple[dict[str, Any], list[str], tuple[str, str] | None]:
    """The report, its lines, and what to raise."""
    from dflash_local.bench import certify as bench
    from dflash_local.bench import report
    from dflash_local.bench.certificate import failure
    from dflash_local.bench.trial import prompt_ids

    plan = bench.Plan(
        prompts=tuple(prompt_ids(session, prompt, trials.thinking) for prompt in trials.prompts),
        cases=bench.cases(seed),
        block_sizes=trials.blocks or (session.facts.block_size,),
        max_new_tokens=trials.tokens,
        planted=trials.planted,
    )
    with console.progress() as line:
        certificate = bench.certify(session, plan, line, load_plain=_plain_target(pair, session))
    found = report.certificate_report(pair, session.facts, trials.prompts, plan, seed, certificate)
    lines = report.certificate_lines(pair, session.facts, plan, seed, certificate)
    return found, lines, failure(certificate) if certificate.verdict == "BUG" else None


def _plain_target(pair: Pair, session: Session) -> Callable[[], Any] | None:
    """How to load the target once more, as transformers has it, for a session whose engine holds it otherwise."""
    from dflash_local.models.checkpoint import Checkpoint
    from dflash_local.models.load_target import load_target, placement
    from dflash_local.models.target_facts import TargetFacts

    if session.facts.engine != "fused":
        return None
    files = Checkpoint.open(pair.target)
    facts = TargetFacts.from_checkpoint(files).quantized(session.facts.load.quantize)
    where = placement(session.facts.device, session.facts.dtype)
    return lambda: load_target(files, facts, where)
