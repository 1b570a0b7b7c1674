"""A task's prompts on one loaded session, plain and drafted, each result kept before the next prompt begins."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from dflash_local.bench.report import Progress
from dflash_local.bench.speed import WARM_UP_TOKENS
from dflash_local.bench.tasks.results import Drafted, PromptResult, ResultsFile, TaskReply, digest_of
from dflash_local.bench.tasks.table import Conversation, Subject, TaskOptions, converse
from dflash_local.bench.trial import write
from dflash_local.engine.session import Session
from dflash_local.errors import DeviceLostError, DFlashError, Interrupted
from dflash_local.request import Limits, Message, Request

PLAIN = 0  # in the place of a block size


def measure(
    session: Session, subject: Subject, files: Mapping[int, ResultsFile], options: TaskOptions, progress: Progress
) -> None:
    """Answer every prompt that a file has no answer of, greedily and from cold caches.

    A prompt that fails is a result like any other, and is tried again by the next run. Which way goes first changes
    with the prompt, so that a machine that warms up or slows down favours none.

    Args:
        files: of the plain replies and of those of each block size.

    Raises:
        DeviceLostError: no further prompt can be answered. Interrupted: the user stopped it.
        UsageError: a result cannot be kept.
    """
    parts = {block: file.next_part for block, file in files.items()}
    began, warm = time.perf_counter(), False
    for number, item in enumerate(subject.items):
        progress(f"{subject.title}: prompt {number + 1} of {len(subject.items)}", number / len(subject.items))
        missing = [block for block, file in files.items() if not file.answered([item.id])]
        start = number % max(len(missing), 1)
        for block in (*missing[start:], *missing[:start]):
            turns: tuple[TaskReply, ...] = ()
            error = ""
            try:
                for other in () if warm else files:
                    _ask(
                        session, other, TaskOptions(WARM_UP_TOKENS, options.thinking), (Message("user", item.turns[0]),)
                    )
                warm = True
                turns = converse(item, partial(_ask, session, block, options))
            except (DeviceLostError, Interrupted):
                raise
            except DFlashError as failed:
                error = f"{failed.kind}: {failed.message}"
            files[block].add(PromptResult(item.id, parts[block], time.perf_counter() - began, turns, error))


def _ask(session: Session, block: int, options: TaskOptions, messages: Conversation) -> TaskReply:
    ids = session.render(Request(messages=messages, thinking=options.thinking)).ids
    request = Request(prompt_ids=ids, limits=Limits(options.max_new_tokens), mode="ar")
    if block != PLAIN:
        request = Request(prompt_ids=ids, limits=request.limits, block_size=block)
    written = write(session, request)
    stats = written.stats
    cycles, drafts = len(stats.acceptance_lengths), sum(cycle.drafted for cycle in written.cycles)
    return TaskReply(
        prompt_tokens=len(ids),
        reused_tokens=0,
        tokens=len(written.ids),
        finish_reason=written.reason,
        ttft_s=stats.ttft_s,
        latency_s=stats.prefill_s + stats.decode_s,
        tokens_per_s=stats.tokens_per_s or None,
        drafted=None if block == PLAIN else Drafted(cycles, drafts, sum(stats.acceptance_lengths) - cycles),
        text=written.text,
        ids=digest_of(written.ids),
    )
