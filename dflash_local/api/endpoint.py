"""What all handlers share: the service pair, the figures, and tickets read from the event loop.

A ticket's events come from threads, and one at a time: a slow client holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

from dflash_local import __version__
from dflash_local.api.guard import Receive
from dflash_local.api.metrics import Metrics
from dflash_local.api.refusals import stopping
from dflash_local.errors import UnknownModelError
from dflash_local.events import Event, Finished, Step
from dflash_local.request import Request
from dflash_local.service.backend import Model
from dflash_local.service.service import MAX_QUEUE, Service
from dflash_local.service.ticket import Ticket

QUIET_S = 10.0
THREADS = 4 * (MAX_QUEUE + 2)  # loading, waiting and running requests each hold one


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Endpoint:
    """One server's state, for the event loop. ``models`` names what ``POST /dflash/v1/load`` may switch to."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        models: Callable[[], tuple[str, ...]] = tuple,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.service, self.metrics, self.models = service, metrics, models
        self.created = int(time.time())
        self.draining = False
        self.live = 0  # requests that are being answered
        self._quiet_s = quiet_s
        self._stopped = asyncio.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dflash-http")

    def model_named(self, name: str) -> Model:
        """Return the served model, when ``name`` means it; UnknownModelError otherwise, which names what is served."""
        model = self.service.model
        if not model.answers_to(name):
            known = ", ".join((model.name, *model.aliases))
            raise UnknownModelError(f"unknown model {name[:80]!r}", f"served here: {known}")
        return model

    def fingerprint(self) -> str:
        """Return what made a reply: this version, and the engine once it is loaded."""
        facts = self.service.facts
        made_by = facts.engine if facts and facts.in_server else facts.loaded_as if facts else ""  # no address of it
        loaded = made_by.replace(", ", "-").replace(" ", "-")
        return "-".join(filter(None, ["dflash-local", __version__, loaded]))

    def drain(self) -> None:
        """Answer new requests with 503 from now on; what runs goes on."""
        self.draining = True

    def stop(self) -> None:
        """End what still runs with an error event."""
        self.draining = True
        self._stopped.set()

    def close(self) -> None:
        """Let the threads go; those that wait for an event end with it."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def follow(self, request: Request, model: str | None, receive: Receive) -> AsyncGenerator[Event | None, None]:
        """Submit and yield the events; None when there was none for a while.

        The reply is cancelled, within one cycle, as soon as nobody follows it any more.

        Raises:
            ClientGone: the client left. Refusal: the server is stopping. DFlashError: the request failed.
        """
        if self.draining:
            raise stopping()
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        submitting = loop.run_in_executor(self._pool, self.service.submit, request, model)
        async with AsyncExitStack() as stack:
            self.live += 1
            stack.callback(self._forget)
            stack.callback(submitting.add_done_callback, _cancel_ticket)
            ends = [loop.create_task(_gone(receive)), loop.create_task(self._stopped.wait())]
            for task in ends:
                stack.callback(task.cancel)
            await self._first(submitting, ends)
            ticket: Ticket = submitting.result()
            tokens = False
            while True:
                upcoming = loop.run_in_executor(self._pool, next, ticket, None)
                upcoming.add_done_callback(_seen)
                while not await self._first(upcoming, ends, self._quiet_s):
                    yield None
                event: Event | None = upcoming.result()
                if event is None:
                    return
                if isinstance(event, Step) and not tokens:
                    tokens = True
                    self.metrics.first_token(time.monotonic() - began)
                elif isinstance(event, Finished):
                    self.metrics.whole(time.monotonic() - began)
                yield event
                if isinstance(event, Finished):
                    return  # nothing follows; the client may leave

    def _forget(self) -> None:
        self.live -= 1

    async def _first(
        self, wanted: asyncio.Future[Any], ends: list[asyncio.Task[Any]], limit: float | None = None
    ) -> bool:
        """Wait for ``wanted``; False when the time is up."""
        await asyncio.wait({wanted, *ends}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return True
        gone, stopped = ends
        if gone.done():
            raise ClientGone
        if stopped.done():
            raise stopping()
        return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _seen(done: asyncio.Future[Any]) -> None:
    """Look at a result that may come when nobody follows any more, so that nothing complains of it."""
    if not done.cancelled():
        done.exception()


def _cancel_ticket(submitting: asyncio.Future[Ticket]) -> None:
    """Cancel a ticket once it exists; harmless for one that is done."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
