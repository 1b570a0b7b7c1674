"""``dflash certify``: is the text the target's own? Has it run both ways, says so, and writes the evidence."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dflash_local.app import measurements
from dflash_local.app.examples import bench_prompts
from dflash_local.bench.prompts import Prompt
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.help_pages import MORE
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.measuring import Report, check_path, conclude, write
from dflash_local.cli.reply import first_interrupt
from dflash_local.cli.server_options import TwoServerOptions, compared
from dflash_local.errors import DFlashError, ExactnessError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.request import MAX_NEW_TOKENS, check_integer

if TYPE_CHECKING:
    from dflash_local.app.model_sources import ServerModels
    from dflash_local.bench.report import Found

TOKENS = 128
MAX_SAMPLES = 100_000
REPORT_IT = "this is an engine bug: please report it with --report FILE attached"

EXAMPLES = ("dflash certify smollm2", 'dflash certify smollm2 --prompt "Count to ten" --report report.json')


def certify(
    model: opt.ModelOrDefault = None,
    drafter: opt.Drafter = None,
    prompt: Annotated[list[str] | None, opt.named("--prompt", "TEXT", "A prompt; repeatable.")] = None,
    prompt_ids: Annotated[
        list[str] | None, opt.named("--prompt-ids", "1,2,3", "A prompt as token ids; repeatable.", MORE)
    ] = None,
    max_new_tokens: Annotated[int, opt.named("--max-new-tokens", "N", "Tokens in a reply at most.")] = TOKENS,
    block_size: Annotated[
        list[int] | None, opt.named("--block-size", "B", "Block size; repeatable; trained size if not given.", MORE)
    ] = None,
    samples: Annotated[
        int,
        opt.named("--samples", "N", "Of servers: sampled replies to each prompt, whose tokens are counted.", MORE),
    ] = 0,
    planted: Annotated[
        bool, typer.Option("--planted", help="Draft the plain text with mistakes: every acceptance length occurs.")
    ] = False,
    seed: opt.Seed = None,
    think: opt.Think = None,
    report: Report = None,
    page: Annotated[
        Path | None, opt.named("--html", "FILE", "Write the verdict there as a page that shows by itself.", MORE)
    ] = None,
    as_json: opt.Json = False,
    *,
    served: TwoServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Compare replies with and without drafting. Greedy and sampled; exit 7 when the engine is at fault."""
    call = Invocation.begin()
    check_integer("max_new_tokens", max_new_tokens, 1, MAX_NEW_TOKENS)
    check_integer("samples", samples, 0, MAX_SAMPLES)
    source = compared(call, model, drafter, load, served)
    pair, servers = source.pair, cast("ServerModels", source.models) if source.models.label else None
    if samples and (servers is None or servers.url is None):
        raise UsageError("--samples is for servers that both run", "give --url, and leave it out for a pair here")
    if servers is not None:
        _check_of_servers(bool(block_size) or planted, seed)
    check_path("--report", report)
    check_path("--html", page)
    thinking, prompts = call.thinks(pair, think), _prompts(pair, prompt or [], prompt_ids or [])
    fault: DFlashError | None
    if servers is not None:
        found, fault = _over_servers(call, servers, pair, prompts, max_new_tokens, thinking, samples)
    else:
        job = partial(
            measurements.certify_pair,
            *(pair, source.load, prompts, thinking),
            max_new_tokens=max_new_tokens,
            block_sizes=tuple(block_size or ()),
            planted=planted,
            seed=seed,
        )
        found = call.measure(pair.name, job)
        failure = found[0]["failure"]
        fault = None if failure is None else ExactnessError(failure, REPORT_IT)
    conclude(call, found, as_json, report)
    if page is not None:
        from dflash_local.report.verdict_page import to_html

        asked = {
            "--drafter": drafter,
            "--prompt": prompt,
            "--prompt-ids": prompt_ids,
            "--max-new-tokens": max_new_tokens,
            "--block-size": block_size,
            "--samples": samples or None,
            "--planted": planted or None,
            "--seed": found[0].get("seed"),
            "--think": think,
        }
        again = shlex.join(["dflash", "certify", pair.name, *_origin(served, load), *_spelled(asked)])
        write("--html", page, to_html(found[0], pair.label if servers is not None else found[1][0], again))
        call.console.note(f"page written: {page}", "dim")
    if fault is not None:
        raise fault


def _check_of_servers(drafts_asked: bool, seed: int | None) -> None:
    """Refuse what only a pair here does. UsageError."""
    if drafts_asked:
        raise UsageError("a server drafts as it was started", "leave --block-size and --planted out")
    if seed is not None:
        what = "replies of servers are compared greedily: two sampled requests of one seed differ there"
        raise UsageError(what, "leave --seed out")


def _over_servers(
    call: Invocation,
    servers: ServerModels,
    pair: Pair,
    prompts: tuple[Prompt, ...],
    max_new_tokens: int,
    thinking: bool,
    samples: int,
) -> tuple[Found, DFlashError | None]:
    """The certificate of two servers, and the error that it ends with."""
    from dflash_local.bench import certify_servers
    from dflash_local.bench.sampled_servers import compare_sampled
    from dflash_local.remote.abilities import asked
    from dflash_local.service.service import Service

    console = call.console
    with console.progress():
        sessions = servers.both(pair, console.notify)
    with Service.over(sessions) as service:
        both_run, abilities, sampled = servers.url is not None, None, None
        comparison = certify_servers.ServerComparison(service, prompts, max_new_tokens, thinking, both_run)
        with console.progress() as line, first_interrupt(comparison.cancel):
            if both_run:
                drafting, plain = sessions.servers
                abilities = asked(drafting, plain=False), asked(plain, plain=True)
            runs = comparison.run(line)
            if samples:
                requests, gone = comparison.requests, lambda: comparison.cancelled
                sampled = compare_sampled(sessions.servers, requests, samples, line, gone)
        facts = sessions.both
    fault = certify_servers.failure(runs, sampled)
    return certify_servers.presented(pair, facts, comparison, runs, abilities, sampled), fault


def _origin(served: TwoServerOptions, load: LoadConfig) -> list[str]:
    """Return the options that say who replies; addresses are left open."""
    if served.url is not None:
        return ["--url", "URL", *(["--plain-url", "URL"] if served.plain_url is not None else [])]
    return ["--engine", served.engine.value] if served.engine is not None else load.arguments()


def _spelled(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line for options that were given: several values of one are repeated."""
    for name, value in options.items():
        if isinstance(value, bool):
            yield name if value else name.replace("--", "--no-", 1)
        else:
            for each in value if isinstance(value, list) else [] if value is None else [value]:
                yield from (name, str(each))


def _prompts(pair: Pair, texts: list[str], ids: list[str]) -> tuple[Prompt, ...]:
    """What the user gave, else a few of those held out with a bundled pair, else the built-in ones."""
    given = [Prompt("given", text=text) for text in texts] + [Prompt("given", ids=opt.parse_ids(text)) for text in ids]
    if any(not text.strip() for text in texts):
        raise UsageError("--prompt is empty")
    return tuple(given or bench_prompts(pair))
