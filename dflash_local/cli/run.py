"""``dflash run``: one prompt, one reply; text to stdout, figures to stderr, or one JSON object."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from dflash_local.app.reply_text import headline
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.reply import first_interrupt, print_reply
from dflash_local.cli.server_options import KeptServerOptions, origin
from dflash_local.errors import Interrupted, UsageError
from dflash_local.events import Finished
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import MAX_MESSAGE_CHARS, Limits, Request, SamplingParams, user_request

if TYPE_CHECKING:
    from dflash_local.service.gathered import Answer

MAX_NEW_TOKENS = 512

EXAMPLES = ('dflash run smollm2 "Write a haiku about the sea"', 'git diff | dflash run smollm2 "Sum up this change"')


def run(
    model: opt.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; piped input is appended to it.")] = "",
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    prompt_ids: Annotated[str | None, opt.named("--prompt-ids", "1,2,3", "Token ids instead of a prompt.")] = None,
    max_new_tokens: opt.MaxNewTokens = None,
    *,
    sampling: dict[str, float | int],
    block_size: opt.BlockSize = None,
    think: opt.Think = None,
    system: opt.System = "",
    stop: Annotated[list[str] | None, opt.named("--stop", "TEXT", "End before this text; repeatable.")] = None,
    as_json: opt.Json = False,
    served: KeptServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Answer one prompt. Greedy unless --temperature is given."""
    from dflash_local.service.conversation import summary
    from dflash_local.service.gathered import Answer
    from dflash_local.store.records import Turn

    call, load = Invocation.begin(), opt.drafting(load, mode)
    user, console = call.user, call.console
    request = _request(
        prompt,
        opt.parse_ids(prompt_ids) if prompt_ids is not None else (),
        system,
        sampling=SamplingParams(**{"temperature": user.temperature or 0.0, **sampling}),  # type: ignore[arg-type]
        limits=Limits(opt.first(max_new_tokens, user.max_new_tokens, MAX_NEW_TOKENS), tuple(stop or ())),
        mode=opt.mode_name(mode),
        block_size=block_size,
    )
    source = origin(call, model, drafter, load, served)
    pair = source.pair
    request = replace(request, thinking=call.thinks(pair, think))
    with source.service(call) as service:
        if request.messages and not service.load().has_tokenizer:
            raise UsageError(f"{pair.name} has no tokenizer", "give token ids: --prompt-ids 1,2,3")
        if not as_json:
            console.note(f"{pair.label}, {service.load().loaded_as}", "dim")
        with Answer(request, service.submit) as answer:
            if as_json:
                with first_interrupt(answer.cancel):
                    deque(answer, maxlen=0)
            else:
                print_reply(answer, console)
        finished, facts = answer.finished, service.facts
        assert finished is not None and facts is not None  # a reply ends with Finished or an error
        if not as_json:
            if not facts.has_tokenizer:
                console.data(",".join(map(str, answer.token_ids)))
            if ending := Turn("assistant", "", figures=summary(finished)).ending:
                console.note(f"[{ending}]", "yellow")
            console.note(headline(finished), "dim")
        elif not answer.cancelled:
            console.json(report(answer, finished, facts))
    if answer.cancelled:
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


def report(answer: Answer, finished: Finished, facts: SessionFacts) -> dict[str, Any]:
    """The JSON object of ``dflash run``. Text is null for a folder without a tokenizer."""
    stats, usage = finished.stats, finished.usage
    return {
        "text": "".join(answer.texts["final"]) if facts.has_tokenizer else None,
        "thinking": answer.thinking if facts.has_tokenizer else None,
        "token_ids": answer.token_ids,
        "acceptance_lengths": list(stats.acceptance_lengths),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "turn_acceptance_length": stats.turn_acceptance_length,
        "verify_rows": dict(stats.verify_rows),
        "mean_verify_rows": stats.mean_verify_rows,
        "undrafted_cycles": stats.undrafted_cycles,
        "copied_cycles": stats.copied_cycles,
        "mtp_cycles": stats.mtp_cycles,
        "distinct_experts": dict(stats.distinct_experts),
        "finish_reason": finished.reason,
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
        "timing": {
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": stats.tokens_per_s,
            "end_to_end_tokens_per_s": stats.end_to_end_tokens_per_s,
            "draft_s": stats.draft_s,
            "verify_s": stats.verify_s,
            "plain_step_s": stats.plain_step_s,
            "plain_from": stats.plain_from or None,
        },
        "mode": stats.mode,
        "engine": stats.engine,
        "target": facts.target,
        "drafter": facts.drafter,
        "block_size": stats.block_size,
        "seed": stats.seed,
        "dtype": facts.dtype or None,
        "device": facts.device,
        "load": asdict(facts.load),
    }
