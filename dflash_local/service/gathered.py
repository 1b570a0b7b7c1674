"""A reply on its way: what came of it so far, and how it is asked for, listened to and stopped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress

from dflash_local.errors import DeviceLostError, Interrupted, ServerError
from dflash_local.events import Channel, Event, Finished, Notice, Step
from dflash_local.request import Request
from dflash_local.service.ticket import Ticket
from dflash_local.store.records import Turn

KEEP_S = 2.0  # a program that is killed loses so much of a reply


class Gathered:
    """What came of one reply so far, added to by one thread and read by any.

    Attributes:
        texts: as the model wrote them. finished: how it ended; None before, or when it failed.
        broken_off: its server, its process or its device went away in the middle of it.

    Args:
        begun: what it goes on from; its texts are the first ones.
    """

    def __init__(self, begun: Turn | None = None) -> None:
        self.texts: dict[Channel, list[str]] = {"final": [], "thinking": [], "tool": []}
        if begun is not None:
            self.texts |= {"final": [begun.content], "thinking": [begun.thinking]}
        self.token_ids: list[int] = []
        self.finished: Finished | None = None
        self.broken_off = False

    def gather(self, event: Event) -> None:
        """Add what an event brought."""
        if isinstance(event, Step):
            self.token_ids += event.token_ids
            for piece in event.pieces:
                self.texts[piece.channel].append(piece.text)
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def text(self) -> str:
        """The answer, calls of tools after its words."""
        return "".join((*self.texts["final"], *self.texts["tool"]))

    @property
    def thinking(self) -> str:
        """What was thought."""
        return "".join(self.texts["thinking"])

    @property
    def stopped(self) -> bool:
        """True when it was ended early."""
        return self.broken_off or (self.finished is not None and self.finished.reason == "cancelled")

    @property
    def worth_keeping(self) -> bool:
        """True when it ended and something came of it."""
        ended = self.broken_off or self.finished is not None
        return ended and (not self.stopped or bool(self.text or self.thinking))


class Answer(Gathered):
    """A reply: an iterator over its events. Use it in a ``with``, which submits the request; that may take a load.

    Leaving the ``with`` decides: a reply that ended is kept as a turn, one that failed, was abandoned
    or was stopped before any text is not, and the conversation is as it was before. What came of a reply before its
    server, its process or its device went away is kept as if it were stopped.

    Attributes:
        begun: the reply that this one goes on from; its text comes in no event.
        notices: what is to be said before the first event.
        turn: what it became in the conversation; None before, and when it was not kept.
    """

    def __init__(
        self,
        request: Request,
        submit: Callable[[Request], Ticket],
        settle: Callable[[Answer], None] = lambda _answer: None,
        begun: Turn | None = None,
        fit: Callable[[Answer], Request] = lambda answer: answer.request,
        keep: Callable[[Answer], None] = lambda _answer: None,
    ) -> None:
        super().__init__(begun)
        self.request: Request = request
        self.begun = begun
        self.turn: Turn | None = None
        self.notices: deque[Notice] = deque()
        self._fit, self._keep, self._kept_at = fit, keep, time.monotonic()
        self._submit, self._settle = submit, settle
        self._lock = threading.RLock()  # Ctrl-C may cancel while this thread is inside
        self._ticket: Ticket | None = None
        self._cancelled = self._settled = False

    def __enter__(self) -> Answer:
        """Submit the request; where it cannot be sent (DFlashError) the conversation is as it was before."""
        with ExitStack() as stack:
            stack.callback(self._end)
            with suppress(Interrupted):  # then no event comes
                self.request = self._fit(self)
                self._listen_to(self._submit(self.request))
            stack.pop_all()
        return self

    def ask(self, request: Request) -> str:
        """Return the text of the reply to another request, which comes before this reply; cancelling ends that, too.

        Raises:
            Interrupted: it was cancelled. DFlashError: see ``Service.submit``, or it failed.
        """
        gathered = Gathered()
        ticket = self._submit(request)
        self._listen_to(ticket)
        try:
            for event in ticket:
                gathered.gather(event)
        finally:
            ticket.cancel()
            self._ticket = None
        if gathered.stopped or self._cancelled:  # which may come too late for a short reply
            raise Interrupted("the reply was stopped")
        return gathered.text

    def _listen_to(self, ticket: Ticket) -> None:
        with self._lock:
            self._ticket = ticket
            if self._cancelled:
                ticket.cancel()

    def __exit__(self, *_error: object) -> None:
        if self.finished is None:
            self.cancel()
        self._end()

    def _end(self) -> None:
        if not self._settled:
            self._settled = True
            self._settle(self)

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> Event:
        if self.notices:
            return self.notices.popleft()
        if self._ticket is None:
            raise StopIteration
        try:
            event = next(self._ticket)
        except (DeviceLostError, ServerError):
            self.broken_off = True
            raise
        self.gather(event)
        if isinstance(event, Step) and time.monotonic() - self._kept_at >= KEEP_S:
            self._keep(self)
            self._kept_at = time.monotonic()
        return event

    def cancel(self) -> None:
        """Stop the reply within one cycle; its last event is ``Finished('cancelled')``. From any thread."""
        with self._lock:
            self._cancelled = True
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()

    @property
    def cancelled(self) -> bool:
        """True when ``cancel`` was called, whether or not it came in time."""
        return self._cancelled

    @property
    def submitted(self) -> bool:
        """True once the model has the request."""
        return self._ticket is not None
