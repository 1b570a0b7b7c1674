"""Owns the one session: a worker thread, a bounded queue, and cancelling.

Every caller (CLI, screens, endpoint) submits a ``Request`` here. Knows events and errors only.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, Protocol

from dflash_local.errors import (
    BusyError,
    DeviceLostError,
    DFlashError,
    EngineError,
    ExactnessError,
    NumericsError,
    PromptError,
)
from dflash_local.events import Event, Finished, Notice, Queued, Started
from dflash_local.loaded import SessionFacts, nothing_done
from dflash_local.request import Request
from dflash_local.service.listener import Listener

MAX_QUEUE = 8
CLOSE_S = 30.0  # a cycle or a prefill chunk ends well within this


class Session(Protocol):
    """The engine's session, as the service sees it.

    ``generate`` prepares the prompt when it is called, and makes the reply while it is iterated: an error of the
    call is one of the request, never of the engine.
    """

    @property
    def facts(self) -> SessionFacts: ...

    def generate(self, request: Request, cancelled: Callable[[], bool] = ...) -> Iterator[Event]: ...

    def close(self) -> None: ...


class Outcome(NamedTuple):
    """How a request ended: without an error when ``Finished`` was published.

    Attributes:
        broke: the session cannot be used any more. started: the reply had begun.
    """

    error: DFlashError | None
    trace: TracebackType | None
    broke: bool
    started: bool


class Ticket:
    """One submitted request: its events, and the way to cancel it."""

    def __init__(self, request: Request, withdraw: Callable[[Ticket], None]) -> None:
        self.request = request
        self._withdraw = withdraw
        self._cancelled = threading.Event()
        self._lock = threading.RLock()  # Ctrl-C may cancel while this thread is inside
        self._listener = Listener()

    def events(self) -> Iterator[Event]:
        """The request's events from the first on, a second call goes on; after them its DFlashError, if any."""
        return self._listener

    def cancel(self) -> None:
        """Stop the reply within one cycle, or leave the queue; ends as ``Finished('cancelled')``."""
        self._cancelled.set()
        self._withdraw(self)

    @property
    def cancelled(self) -> bool:
        """True when ``cancel`` was called, whether or not it came in time."""
        return self._cancelled.is_set()

    @property
    def done(self) -> bool:
        """True when nothing follows."""
        return self._listener.ended

    def publish(self, event: Event) -> None:
        """Add an event (for the service)."""
        with self._lock:
            self._listener.put(event)
            if isinstance(event, Finished):
                self._listener.end()

    def fail(self, error: DFlashError) -> None:
        """End the request with an error (for the service)."""
        with self._lock:
            self._listener.end(error)


class Service:
    """Runs one request at a time on the session, in the order they came.

    Args:
        session: used by the worker thread alone from now on.
        max_queue: requests that may wait besides the running one.
        load_again: loads the pair afresh where its device's context was lost; at most once until a reply ends.
    """

    def __init__(
        self, session: Session, max_queue: int = MAX_QUEUE, load_again: Callable[[], Session] | None = None
    ) -> None:
        self._session, self._load_again = session, load_again
        self._reloaded = False  # since the last reply that ended
        self._max_queue = max_queue
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._broken: EngineError | None = None
        self._worker = threading.Thread(target=self._work, name="dflash-service", daemon=True)
        self._worker.start()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def facts(self) -> SessionFacts:
        """What was loaded, and how."""
        return self._session.facts

    @property
    def broken(self) -> bool:
        """True after an engine error: the session must be loaded again."""
        return self._broken is not None

    @property
    def fault(self) -> EngineError | None:
        """The error that broke the session."""
        return self._broken

    def submit(self, request: Request) -> Ticket:
        """Queue a request.

        Raises:
            BusyError: the queue is full.
            EngineError: the session is broken or closed.
        """
        with self._changed:
            if self._broken is not None:
                raise EngineError(f"the session is broken: {self._broken.message}", "load the model again")
            if self._closed:
                raise EngineError("the session is closed", "load the model again")
            if len(self._waiting) >= self._max_queue:
                raise BusyError(
                    f"{len(self._waiting)} requests are waiting already, as many as may wait", "try again in a moment"
                )
            ticket = Ticket(request, self._withdraw)
            self._waiting.append(ticket)
            ticket.publish(Queued(len(self._waiting) - 1 + (self._running is not None)))
            self._changed.notify_all()
        return ticket

    def close(self) -> None:
        """Cancel everything, let the worker close the session, and wait for it."""
        with self._changed:
            self._closed = True
            tickets = [*self._waiting, *([self._running] if self._running else [])]
            self._changed.notify_all()
        for ticket in tickets:
            ticket.cancel()
        if threading.current_thread() is not self._worker:
            self._worker.join(CLOSE_S)

    def _withdraw(self, ticket: Ticket) -> None:
        """A cancelled ticket that has not begun ends at once and frees its place."""
        with self._changed:
            if ticket not in self._waiting:
                return
            self._waiting.remove(ticket)
            self._notify_positions()
        ticket.publish(nothing_done(self._session.facts, ticket.request))

    def _notify_positions(self) -> None:
        for index, ticket in enumerate(self._waiting):
            ticket.publish(Queued(index + (self._running is not None)))

    def _work(self) -> None:
        try:
            while (ticket := self._next()) is not None:
                trace = self._serve(ticket)
                with self._changed:
                    self._running = None
                # Its frames hold the prompt and, through the ticket, the error itself: a circle that stays for long.
                traceback.clear_frames(trace)
                del ticket, trace
        finally:
            self._abandon()
        self._session.close()

    def _abandon(self) -> None:
        """The worker ends: nobody is left to answer those who still wait, if there are any."""
        with self._changed:
            left = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            self._running = None
            if not self._closed:
                self._broken = self._broken or EngineError("the worker of the session died")
        for ticket in left:
            ticket.fail(EngineError("the worker of the session died", "load the model again"))

    def _next(self) -> Ticket | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            self._running = self._waiting.popleft()
            self._notify_positions()
            return self._running

    def _serve(self, ticket: Ticket) -> TracebackType | None:
        """Run one request to its one end: ``Finished`` or one typed error, whose traceback is returned."""
        if self._broken is not None:
            ticket.fail(EngineError(f"the session is broken: {self._broken.message}", "load the model again"))
            return None
        outcome = self._answer(ticket)
        if isinstance(outcome.error, DeviceLostError) and self._load_again is not None and not self._reloaded:
            traceback.clear_frames(outcome.trace)  # they hold what lies on the device
            outcome = self._answer_again(ticket, outcome, self._load_again)
        if outcome.broke and isinstance(outcome.error, EngineError):
            self._broken = outcome.error
        if outcome.error is not None:
            ticket.fail(outcome.error)
        else:
            self._reloaded = False
        trace = outcome.trace
        del outcome, ticket  # this frame is kept by those of the traceback, which are all that is cleared
        return trace

    def _answer_again(self, ticket: Ticket, lost: Outcome, load_again: Callable[[], Session]) -> Outcome:
        """Load the pair afresh; a request whose reply had not begun is answered then."""
        cause = lost.error.message if lost.error is not None else ""
        ticket.publish(Notice(f"{cause}; the pair is loaded again", "warning"))
        self._reloaded = True
        try:
            self._session.close()
            self._session = load_again()
        except (DFlashError, RuntimeError, MemoryError, OSError) as fault:
            message, hint = (fault.message, fault.hint) if isinstance(fault, DFlashError) else (str(fault), "")
            error = EngineError(f"{cause}; it cannot be loaded again: {message}", hint or "start the program again")
            return Outcome(error, None, True, lost.started)
        if not lost.started:
            return self._answer(ticket)
        return Outcome(DeviceLostError(f"{cause}; the pair was loaded again", "send it again"), None, False, True)

    def _answer(self, ticket: Ticket) -> Outcome:
        """Publish a request's events."""
        trace: TracebackType | None = None
        error: DFlashError | None = None
        begun = started = False
        try:
            events = self._session.generate(ticket.request, lambda: ticket.cancelled)
            begun = True
            for event in events:
                started = started or isinstance(event, Started)
                ticket.publish(event)
            if not ticket.done:
                error = EngineError("the engine ended a reply without saying why")
        except DFlashError as raised:
            error, trace = raised, raised.__traceback__
        except BaseException as raised:  # a named broad one: an unknown fault, or a library's panic, ends no worker
            kind, what = (EngineError, "the engine failed") if begun else (PromptError, "the prompt cannot be prepared")
            error = kind(f"{what}: {type(raised).__name__}: {raised}", "run again with --debug for the traceback")
            error.__cause__, trace = raised, raised.__traceback__
        # A request that failed by its own input, logits or memory leaves the session healthy.
        broke = begun and isinstance(error, EngineError) and not isinstance(error, (NumericsError, ExactnessError))
        return Outcome(error, trace, broke, started)
