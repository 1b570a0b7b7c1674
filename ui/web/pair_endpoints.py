"""What programs may call by name, through Gradio's client: the pairs of this machine, measuring, certifying."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import gradio as gr

from dflash_local.errors import DFlashError, UsageError
from dflash_local.ui.web import bench_run
from dflash_local.ui.web.about import Certifying
from dflash_local.ui.web.bench_run import BenchRun
from dflash_local.ui.web.jobs import Job
from dflash_local.ui.web.models_view import ModelsView
from dflash_local.ui.web.visitors import Visitors

PULSE_S = 0.2
SIGN_S = 1.0
F = TypeVar("F", bound=Callable[..., Any])


def build(models_view: ModelsView, visitors: Visitors) -> None:
    """Add the endpoints; called inside the page's ``gr.Blocks``."""
    calls = _Calls(models_view, visitors)
    for call in (
        calls.models,
        calls.pull,
        calls.cancel_pull,
        calls.remove,
        calls.load,
        calls.unload,
        calls.bench,
        calls.about,
        calls.certify,
    ):
        gr.api(call, api_name=call.__name__, concurrency_limit=None)


def _gives(kind: Any) -> Callable[[F], F]:
    """What an endpoint gives back, or streams: Gradio reads neither iterators nor annotations that are text."""

    def mark(call: F) -> F:
        call.__annotations__["return"] = kind
        return call

    return mark


@contextmanager
def _gradio_errors() -> Iterator[None]:
    """Errors as Gradio's clients are told them; the server's log needs no traceback of them."""
    try:
        yield
    except DFlashError as error:
        raise gr.Error(str(error), print_exception=False) from error


async def _news(job: Job[Any], look: Callable[[], tuple[Any, ...]]) -> AsyncIterator[tuple[Any, ...]]:
    """What there is to see of a job whenever it changed, and now and then: only so is a client found out that left."""
    seen: tuple[Any, ...] | None = None
    until = 0.0
    async for _ in job.pulses(PULSE_S):
        now = look()
        if now != seen or time.monotonic() > until:
            seen, until = now, time.monotonic() + SIGN_S
            yield now


class _Calls:
    """One method for each endpoint."""

    def __init__(self, models_view: ModelsView, visitors: Visitors) -> None:
        self._models, self._visitors = models_view, visitors

    @_gives(list[dict[str, Any]])
    def models(self) -> Any:
        """The pairs of the registry: name, state on this machine, whether it fits, size of the download."""
        with _gradio_errors():
            served = self._models.served.name
            return [{**asdict(entry), "served": entry.name == served} for entry in self._models.entries()]

    @_gives(dict[str, Any])
    async def pull(self, name: str) -> AsyncIterator[Any]:
        """Download and verify a pair. Streams how far it is. It goes on when nobody listens; see /cancel_pull.

        Parameters:
            name: one that /models lists, or a pre-quantised target's repository.
        """
        with _gradio_errors():
            pull = await asyncio.to_thread(self._models.download, name)
            async for done, total, line in _news(pull.job, lambda: pull.figures):
                yield {"name": pull.name, "done": done, "total": total, "line": line}
            if pull.error is not None:
                raise pull.error
            done, total, _line = pull.figures
            yield {"name": pull.name, "done": done, "total": total, "line": pull.verdict}

    @_gives(str)
    def cancel_pull(self) -> Any:
        """End the download that is under way; finished files are kept."""
        with _gradio_errors():
            pull = self._models.pull
            if pull is None or not pull.running:
                raise UsageError("nothing is being downloaded")
            pull.cancel()
            return f"{pull.name}: the download is being cancelled"

    @_gives(str)
    def remove(self, name: str, dry_run: bool = False) -> Any:
        """Delete a pair's files that nobody else needs. Says what was freed.

        Parameters:
            name: one that /models lists.
            dry_run: only say what would go.
        """
        with _gradio_errors():
            return self._models.removal(name) if dry_run else self._models.remove(name)

    @_gives(str)
    def load(self, name: str, quantize: str = "", context: int = 0, draft: bool = True) -> Any:
        """Have a pair of this machine in memory in place of the one that is served. Takes as long as the load.

        Parameters:
            name: one that /models lists, or a pre-quantised target's repository.
            quantize: what its weights are rounded to as they are read; empty leaves them as they are.
            context: tokens; 0 is the most that fits.
            draft: False loads no drafter.
        """
        with _gradio_errors():
            if quantize or context > 0 or not draft or self._models.served.listed_name(name) != name:
                return self._models.load_as(name, quantize or None, context if context > 0 else None, draft)
            return self._models.load(name)

    @_gives(str)
    def unload(self) -> Any:
        """Give the memory back. The next request loads the pair again."""
        with _gradio_errors():
            return self._models.unload()

    @_gives(dict[str, Any])
    async def bench(self, request: gr.Request, max_tokens: int = 128, prompts: int = 0) -> AsyncIterator[Any]:
        """Run the built-in prompts without and with drafting; /stop ends it.

        Streams how far it is; the last is the report.

        Parameters:
            max_tokens: of each reply at most.
            prompts: how many of them; 0 takes all.
        """
        with _gradio_errors():
            served = self._models.served
            chosen = await asyncio.to_thread(served.bench_prompts)
            run = BenchRun(served.resident, chosen[:prompts] if prompts > 0 else chosen, max_tokens)
            job: Job[None] = Job(run.run, run.stop)
            running = self._visitors.of(request).running
            running.append(run)
            try:
                async for line, fraction in _news(job, lambda: (run.line, run.fraction)):
                    yield {"line": line, "fraction": fraction}
                if job.error is not None:
                    raise job.error
                yield bench_run.report(run, await asyncio.to_thread(served.provenance))
            finally:
                job.cancel()
                running.remove(run)

    @_gives(dict[str, str])
    def about(self) -> Any:
        """Versions, machine, the pair that is served, and how strong the promise of equal text is with it."""
        with _gradio_errors():
            return dict(self._models.served.about())

    @_gives(dict[str, Any])
    async def certify(self, request: gr.Request) -> AsyncIterator[Any]:
        """Prove that the text is the target's own; unloads the pair. Streams how far it is; the last is the report.

        /stop ends it.
        """
        with _gradio_errors():
            one = Certifying(self._models.served)
            running = self._visitors.of(request).running
            running.append(one)
            try:
                async for line, fraction in _news(one.job, lambda: (one.line, one.fraction)):
                    yield {"line": line, "fraction": fraction}
                yield dict(one.job.result)
            finally:
                one.job.cancel()
                running.remove(one)
