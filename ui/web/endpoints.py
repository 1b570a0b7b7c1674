"""What programs may call by name, through Gradio's client: a reply, its end, a race. Each call stands alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any, Literal

import gradio as gr

from dflash_local.app.served_pair import ServedPair
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import Finished
from dflash_local.request import Message, Request
from dflash_local.service.chat_options import merged
from dflash_local.service.conversation import Answer, summary
from dflash_local.ui.readings import Readings
from dflash_local.ui.web.chat_view import chat_options
from dflash_local.ui.web.contest import Contest
from dflash_local.ui.web.jobs import Job
from dflash_local.ui.web.race import race_content, race_request
from dflash_local.ui.web.reply import Reply
from dflash_local.ui.web.visitors import Visitors


def build(served: ServedPair, visitors: Visitors) -> None:
    """Add the endpoints; called inside the page's ``gr.Blocks``."""
    gr.api(_chat(served, visitors), api_name="chat", concurrency_limit=None)
    gr.api(_race(served, visitors), api_name="race", concurrency_limit=None)
    gr.api(_stop(visitors), api_name="stop", concurrency_limit=None)


def _chat(served: ServedPair, visitors: Visitors) -> Callable[..., Any]:
    async def chat(
        request: gr.Request,
        message: str,
        history: list[dict[str, str]] | None = None,
        system: str = "",
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        block_size: int | None = None,
        mode: Literal["dflash", "ar"] | None = None,
        thinking: bool | None = None,
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Reply to a message. Streams the text so far and its figures; the last figures are those of the whole reply.

        Parameters:
            message: what the user says.
            history: what was said before, as {"role": ..., "content": ...} objects.
            system: the system prompt.
            temperature: 0 is greedy; null is the model's own, as for all that follow.
        """
        resident = served.resident
        given = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_tokens, "seed": seed}
        try:
            options = chat_options(resident, system, mode or "", thinking, block_size=block_size, **given)
            head = (Message("system", system),) if system.strip() else ()
            asked = Request(
                messages=(*head, *_messages(history), Message("user", message)),
                sampling=merged(resident.model.sampling, options.sampling),
                limits=options.limits,
                mode=options.mode,
                block_size=options.block_size,
                thinking=options.thinking,
            )
        except DFlashError as error:
            raise _gradio_error(error) from error
        reply = Reply(Answer(asked, resident.submit), resident, Readings(mode=asked.mode), None)
        job = Job(reply.run, reply.stop)
        running = visitors.of(request).running
        running.append(reply)
        seen = -1
        try:
            async for _ in job.pulses():
                if reply.version != seen:
                    seen = reply.version
                    yield reply.source.text, _so_far(reply)
            _result(job)
            yield reply.source.text, _so_far(reply)
        finally:  # nobody listens any more
            job.cancel()
            running.remove(reply)

    chat.__annotations__["return"] = tuple[str, dict[str, Any]]  # what is streamed; Gradio reads no iterators
    return chat


def _race(served: ServedPair, visitors: Visitors) -> Callable[..., Any]:
    async def race(
        request: gr.Request,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Run one prompt without and with drafting, one after the other. Streams how far it is; the last is the result.

        Parameters:
            prompt: what both reply to; empty takes a built-in one.
            max_tokens: of each reply.
            temperature: 0 is greedy.
            seed: of both; null draws one.
        """
        resident = served.resident
        text = prompt or next(iter(served.examples), "")
        try:
            contest = Contest(resident, race_request(resident, text, max_tokens, temperature, seed))
        except DFlashError as error:
            raise _gradio_error(error) from error
        job = Job(contest.run, contest.stop)
        running = visitors.of(request).running
        running.append(contest)
        seen = ""
        try:
            async for _ in job.pulses():
                if contest.state != seen:
                    seen = contest.state
                    yield seen, {}
            result = _result(job)
            yield result.verdict, await asyncio.to_thread(race_content, served, result, text)
        finally:
            job.cancel()
            running.remove(contest)

    race.__annotations__["return"] = tuple[str, dict[str, Any]]
    return race


def _stop(visitors: Visitors) -> Callable[..., Any]:
    def stop(request: gr.Request) -> int:
        """End what this client has under way; what came of a reply is kept. Returns how many that were."""
        visitor = visitors.of(request)
        count = len(visitor.running) + visitor.chat.busy
        visitor.stop()
        return count

    stop.__annotations__["return"] = int
    return stop


def _messages(history: list[dict[str, str]] | None) -> list[Message]:
    rows = history or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError("history must be a list of objects with role and content")
    return [Message(row.get("role", ""), row.get("content", "")) for row in rows]  # type: ignore[arg-type]


def _so_far(reply: Reply) -> dict[str, Any]:
    finished: Finished | None = reply.source.finished
    readings = reply.readings
    if finished is not None:
        whole = {**summary(finished), "thinking": reply.source.thinking}
        return {**whole, "usage": asdict(finished.usage), "stats": asdict(finished.stats)}
    return {"state": reply.state, "tokens": readings.tokens, "tokens_per_s": readings.mean}


def _result(job: Job[Any]) -> Any:
    try:
        return job.result
    except DFlashError as error:
        raise _gradio_error(error) from error


def _gradio_error(error: DFlashError) -> gr.Error:
    """The same error as Gradio's clients are told; the server's log needs no traceback of it."""
    return gr.Error(str(error), print_exception=False)
