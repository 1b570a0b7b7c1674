"""``dflash run``: one prompt, one reply; text to stdout, figures to stderr, or one JSON object."""

from __future__ import annotations

import io
import os
import stat
import sys
from dataclasses import asdict, replace
from typing import Annotated, Any, TextIO

import typer

from dflash_local.app.reply_text import figures
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.load_options import add_command
from dflash_local.cli.reply import Reply, ReplyPrinter, follow
from dflash_local.errors import Interrupted, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import MAX_MESSAGE_CHARS, Limits, Request, SamplingParams, user_request
from dflash_local.service.service import Service

MAX_NEW_TOKENS = 512


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, "run", run)


def run(
    model: opt.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; piped input is appended to it.")] = "",
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="1,2,3", help="Token ids instead of a prompt.")
    ] = None,
    max_new_tokens: opt.MaxNewTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    seed: opt.Seed = None,
    block_size: opt.BlockSize = None,
    think: opt.Think = None,
    system: opt.System = "",
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable.")
    ] = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Answer one prompt. Greedy unless --temperature is given."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    user, console = call.user, call.console
    request = _request(
        prompt,
        opt.parse_ids(prompt_ids) if prompt_ids is not None else (),
        system,
        sampling=opt.sampling(
            SamplingParams(temperature=user.temperature or 0.0),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
        ),
        limits=Limits(opt.first(max_new_tokens, user.max_new_tokens, MAX_NEW_TOKENS), tuple(stop or ())),
        mode=opt.mode_name(mode),
        block_size=block_size,
    )
    pair = call.pair(model, drafter, load)
    request = replace(request, thinking=call.thinks(pair, think))
    with call.start(pair, load) as service:
        if request.messages and not service.facts.has_tokenizer:
            raise UsageError(f"{pair.name} has no tokenizer", "give token ids: --prompt-ids 1,2,3")
        reply = _as_json(service, request, console) if as_json else _as_text(service, request, console, pair)
    if reply.stopped:
        raise Interrupted("interrupted")


def _request(prompt: str, ids: tuple[int, ...], system: str, **rest: Any) -> Request:
    """A request from ids, or from the prompt and what is piped in."""
    if ids:
        if prompt or system:
            raise UsageError("--prompt-ids stands for the whole prompt", "leave the prompt and --system out")
        return Request(prompt_ids=ids, **rest)
    whole = "\n\n".join(part for part in (clean(prompt), piped_text(sys.stdin)) if part)
    if not whole.strip():
        raise UsageError("there is no prompt", 'give one: dflash run MODEL "prompt", or talk: dflash chat MODEL')
    return user_request(whole, clean(system), **rest)


def piped_text(stdin: TextIO | None) -> str:
    """What a pipe or a file gives on stdin, up to the longest allowed message; "" from a terminal.

    Character devices are not read: a job without a terminal may have one that never ends.
    """
    if stdin is None or stdin.closed or stdin.isatty():
        return ""
    try:
        kind = os.fstat(stdin.fileno()).st_mode
    except (io.UnsupportedOperation, OSError):
        kind = stat.S_IFIFO  # text held in memory
    if stat.S_ISCHR(kind):
        return ""
    buffer = getattr(stdin, "buffer", None)
    raw = stdin.read(MAX_MESSAGE_CHARS + 1) if buffer is None else buffer.read(4 * MAX_MESSAGE_CHARS + 4)
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    return text.rstrip("\r\n")


def clean(text: str) -> str:
    """Text without lone surrogates, which arguments that are not UTF-8 turn into."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _as_text(service: Service, request: Request, console: Console, pair: Pair) -> Reply:
    printer = ReplyPrinter(console)
    try:
        reply = follow(service.submit(request), printer)
    finally:
        printer.finish()
    facts, stats = service.facts, reply.finished.stats
    if not facts.has_tokenizer:
        console.data(",".join(map(str, reply.token_ids)))
    console.note(
        f"{pair.label}, {stats.mode}, block {stats.block_size}, {facts.loaded_as}, seed {stats.seed}",
        "dim",
    )
    console.note(figures(reply.finished), "dim")
    return reply


def _as_json(service: Service, request: Request, console: Console) -> Reply:
    reply = follow(service.submit(request), lambda _event: None)
    if not reply.stopped:
        console.json(report(reply, service.facts))
    return reply


def report(reply: Reply, facts: SessionFacts) -> dict[str, Any]:
    """The JSON object of ``dflash run``. Text is null for a folder without a tokenizer."""
    stats, usage = reply.finished.stats, reply.finished.usage
    return {
        "text": reply.text if facts.has_tokenizer else None,
        "thinking": reply.thinking if facts.has_tokenizer else None,
        "token_ids": list(reply.token_ids),
        "acceptance_lengths": list(stats.acceptance_lengths),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "turn_acceptance_length": stats.turn_acceptance_length,
        "verify_rows": dict(stats.verify_rows),
        "mean_verify_rows": stats.mean_verify_rows,
        "undrafted_cycles": stats.undrafted_cycles,
        "distinct_experts": dict(stats.distinct_experts),
        "finish_reason": reply.finished.reason,
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
        "timing": {
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": stats.tokens_per_s,
            "end_to_end_tokens_per_s": stats.end_to_end_tokens_per_s,
            "draft_s": stats.draft_s,
            "verify_s": stats.verify_s,
        },
        "mode": stats.mode,
        "engine": stats.engine,
        "target": facts.target,
        "drafter": facts.drafter,
        "block_size": stats.block_size,
        "seed": stats.seed,
        "dtype": facts.dtype,
        "device": facts.device,
        "load": asdict(facts.load),
    }
