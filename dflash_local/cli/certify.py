"""``dflash certify``: is the text the target's own? Runs it both ways, says so, and writes the evidence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_local.app.examples import bench_prompts
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.measuring import Report, check_report_path, conclude
from dflash_local.cli.reply import first_interrupt
from dflash_local.cli.server_options import TwoServerOptions
from dflash_local.cli.two_servers import compared
from dflash_local.errors import ExactnessError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.request import MAX_NEW_TOKENS, check_integer, fresh_seed
from dflash_local.service.service import Service

if TYPE_CHECKING:
    from dflash_local.app import server_certificate
    from dflash_local.app.two_servers import ComparedServers
    from dflash_local.bench.prompts import Prompt
    from dflash_local.engine.session import Session

TOKENS = 128


def certify(
    model: opt.Model,
    drafter: opt.Drafter = None,
    prompt: Annotated[list[str] | None, opt.named("--prompt", "TEXT", "A prompt; repeatable.")] = None,
    prompt_ids: Annotated[
        list[str] | None, opt.named("--prompt-ids", "1,2,3", "A prompt as token ids; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, opt.named("--max-new-tokens", "N", "Tokens in a reply at most.")] = TOKENS,
    block_size: Annotated[
        list[int] | None, opt.named("--block-size", "B", "Block size; repeatable; trained size if not given.")
    ] = None,
    planted: Annotated[
        bool, typer.Option("--planted", help="Draft AR's own text with mistakes: every acceptance length occurs.")
    ] = False,
    seed: opt.Seed = None,
    think: opt.Think = None,
    report: Report = None,
    as_json: opt.Json = False,
    json_progress: Annotated[
        bool, typer.Option("--json-progress", help="Print progress as JSON lines, too.", hidden=True)
    ] = False,
    *,
    served: TwoServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Compare replies with and without drafting, greedy and sampled; exit 7 when the engine is at fault."""
    call = Invocation.begin()
    check_integer("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
    console = call.console
    console.json_progress = json_progress
    source = compared(call, model, drafter, load, served)
    if source.servers is not None:
        _refuse_over_servers(block_size, planted, seed)
    pair = source.origin.pair
    check_report_path(report)
    thinking = call.thinks(pair, think)
    if source.servers is not None:
        from dflash_local.app.server_certificate import Plan

        asked = Plan(_prompts(pair, prompt or [], prompt_ids or []), max_new_tokens, thinking)
        return _over_servers(call, source.servers, pair, asked, as_json, report)
    with call.session(pair, source.origin.load) as session:
        from dflash_local.bench import certify as bench
        from dflash_local.bench import report as reports
        from dflash_local.bench.certificate import failure
        from dflash_local.bench.trial import prompt_ids as ids_of

        prompts = _prompts(pair, prompt or [], prompt_ids or [])
        seed = fresh_seed() if seed is None else seed
        plan = bench.Plan(
            prompts=tuple(ids_of(session, each, thinking) for each in prompts),
            cases=bench.cases(seed),
            block_sizes=tuple(block_size or (session.facts.block_size,)),
            max_new_tokens=max_new_tokens,
            planted=planted,
        )
        with console.progress() as line:
            certificate = bench.certify(session, plan, line, load_plain=_plain_target(pair, session))
        found = reports.certificate_report(pair, session.facts, prompts, plan, seed, certificate)
        lines = reports.certificate_lines(pair, session.facts, plan, seed, certificate)
    conclude(console, found, lines, as_json, report)
    if certificate.verdict == "BUG":
        raise ExactnessError(*failure(certificate))


def _refuse_over_servers(block_size: list[int] | None, planted: bool, seed: int | None) -> None:
    """Options that mean nothing where a server drafts."""
    if block_size or planted:
        raise UsageError("a server drafts as it was started", "leave --block-size and --planted out")
    if seed is not None:
        raise UsageError(
            "replies of servers are compared greedily: two sampled requests of one seed differ there",
            "leave --seed out",
        )


def _over_servers(
    call: Invocation,
    servers: ComparedServers,
    pair: Pair,
    plan: server_certificate.Plan,
    as_json: bool,
    report: Path | None,
) -> None:
    """The certificate of two servers.

    Raises:
        ExactnessError: a first difference is wider than a near-tie. DFlashError: one cannot be judged.
    """
    from dflash_local.app import server_certificate

    console = call.console
    with console.progress():
        sessions = servers.session(pair, call.user, console.notify)
    with Service(sessions) as service:
        comparison = server_certificate.Comparison(service, plan)
        with console.progress() as line, first_interrupt(comparison.cancel):
            runs = comparison.run(line)
        facts = sessions.both
    found = server_certificate.report(pair, facts, plan, comparison, runs)
    conclude(console, found, server_certificate.lines(pair, facts, runs, sys.maxsize), as_json, report)
    fault = server_certificate.failure(runs)
    if fault is not None:
        raise fault


def _prompts(pair: Pair, texts: list[str], ids: list[str]) -> tuple[Prompt, ...]:
    """What the user gave, else a few of those held out with a bundled pair, else the built-in ones."""
    from dflash_local.bench.prompts import Prompt

    given = [Prompt("given", text=text) for text in texts] + [Prompt("given", ids=opt.parse_ids(text)) for text in ids]
    if any(not text.strip() for text in texts):
        raise UsageError("--prompt is empty")
    return tuple(given or bench_prompts(pair))


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
