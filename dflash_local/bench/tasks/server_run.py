"""A task's prompts on a running server, so many at a time: a worker sends its next prompt when its own is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

from dflash_local.bench.report import Progress
from dflash_local.bench.tasks.results import Drafted, PromptResult, ResultsFile, ResultsPart, TaskReply, digest_of
from dflash_local.bench.tasks.table import Conversation, Item, Subject, TaskOptions, converse
from dflash_local.errors import DFlashError, Interrupted, ServerError
from dflash_local.remote import server_metrics
from dflash_local.remote.openai_server import OpenAIServer, ServerAnswer
from dflash_local.remote.server_metrics import Counters, ServerAcceptance, Unattributable
from dflash_local.request import Limits, Message, Request

WARM_UP_TOKENS = 16
GOES_ON = "what was measured is kept: start the server and run it again, it goes on there"


@dataclass(frozen=True, slots=True)
class LoopOptions(TaskOptions):
    """What is run on every prompt, so many requests at a time."""

    concurrency: int = 1


def measure(
    session: OpenAIServer, subject: Subject, file: ResultsFile, options: LoopOptions, progress: Progress
) -> None:
    """Answer every prompt that ``file`` has no answer of, greedily.

    A prompt that fails is a result like any other, and is tried again by the next run.

    Raises:
        ServerError: the server is gone. Interrupted: the user stopped it. UsageError: a result cannot be kept.
    """
    items = [item for item in subject.items if not file.answered([item.id])]
    if not items:
        return
    # One uninterrupted measured part, after a warm-up of as many short requests as run at a time.
    number, title = file.next_part, f"{subject.title}, {options.concurrency} at a time"
    with _Loop(session, options).open() as loop:
        progress(f"{title}: warm-up", 0.0)
        start = session.counters()
        before = session.settled(start, loop.warm_up())
        for done, result in enumerate(loop.run(items, number), 1):
            file.add(result)
            progress(f"{title}: prompt {done} of {len(items)}", done / len(items))
    wall_s = max(file.results[item.id].ended_s for item in items)
    drafted, reason = _drafted(session, before, loop.answers)
    file.end(ResultsPart(number, wall_s, drafted, reason))


def _drafted(session: OpenAIServer, before: Counters | None, requests: int) -> tuple[Drafted | None, str]:
    """What the server's counters tell of a whole part, or why they do not."""
    if session.facts.drafts is False:
        return None, "it does not draft"
    try:
        found = server_metrics.difference(before, session.settled(before, requests), requests)
    except Unattributable as why:
        return None, str(why)
    return _counts(found), ""


class _Loop:
    """The workers. ``answers``: requests that were answered to their end since the warm-up."""

    def __init__(self, session: OpenAIServer, options: LoopOptions) -> None:
        self._session, self._options = session, options
        self._pool = ThreadPoolExecutor(options.concurrency, "dflash-bench")
        self._stopped = threading.Event()
        self._began = 0.0
        self._lock = threading.Lock()
        self.answers = 0

    @contextmanager
    def open(self) -> Iterator[_Loop]:
        """Hang up at the end, whatever ended it."""
        try:
            yield self
        finally:
            self._stopped.set()
            self._pool.shutdown(cancel_futures=True)

    def warm_up(self) -> int:
        """Short requests at the same time, of prompts that are not measured; how many were answered."""
        futures = [self._pool.submit(self._warm, place) for place in range(self._options.concurrency)]
        return sum(future.result() for future in as_completed(futures))

    def run(self, items: Sequence[Item], part: int) -> Iterator[PromptResult]:
        """The results as they come; an error is raised once no request is under way any more."""
        self.answers, self._began = 0, time.perf_counter()
        futures: list[Future[PromptResult]] = [self._pool.submit(self._result, item, part) for item in items]
        failed: BaseException | None = None
        for future in as_completed(futures):
            error = None if future.cancelled() else future.exception()
            if error is None and not future.cancelled():
                yield future.result()
            elif failed is None:
                failed = error
                self._stopped.set()
                for other in futures:
                    other.cancel()
        if failed is not None:
            raise failed

    def _warm(self, place: int) -> bool:
        try:
            self._ask((Message("user", f"Count from {place} to {place + 9}."),), WARM_UP_TOKENS)
        except Interrupted:
            raise
        except DFlashError as error:
            self._check_there(error)
            return False
        return True

    def _result(self, item: Item, part: int) -> PromptResult:
        turns: tuple[TaskReply, ...] = ()
        error = ""
        try:
            turns = converse(item, self._counted)
        except Interrupted:
            raise
        except DFlashError as failed:
            self._check_there(failed)
            error = f"{failed.kind}: {failed.message}"
        ended_s = time.perf_counter() - self._began
        return PromptResult(item.id, part, ended_s, turns, error)

    def _counted(self, messages: Conversation) -> TaskReply:
        answer = self._ask(messages, self._options.max_new_tokens)
        with self._lock:
            self.answers += 1
        return _reply(answer)

    def _ask(self, messages: Conversation, tokens: int) -> ServerAnswer:
        request = Request(messages=messages, limits=Limits(tokens), thinking=self._options.thinking)
        return self._session.answer(request, self._stopped.is_set)

    def _check_there(self, error: DFlashError) -> None:
        """Raises ServerError where the server is gone, and not only one request failed."""
        if isinstance(error, ServerError) and not self._session.is_there(self._stopped.is_set):
            raise ServerError(error.message, GOES_ON) from error


def _reply(answer: ServerAnswer) -> TaskReply:
    stats, usage = answer.finished.stats, answer.finished.usage
    return TaskReply(
        prompt_tokens=usage.prompt_tokens,
        reused_tokens=answer.reused_tokens,
        tokens=usage.completion_tokens if answer.counted else None,
        finish_reason=answer.finished.reason,
        ttft_s=stats.ttft_s,
        latency_s=stats.ttft_s + stats.decode_s,
        tokens_per_s=stats.tokens_per_s or None,
        drafted=None if answer.acceptance is None else _counts(answer.acceptance),
        text=answer.text,
        ids=digest_of(answer.token_ids),
        thinking=digest_of(answer.thinking.encode()),
    )


def _counts(found: ServerAcceptance) -> Drafted:
    return Drafted(found.cycles, found.drafted, found.accepted)
