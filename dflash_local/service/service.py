"""Serves one model: a queue of requests, a thread that answers them in order, and the life of the loaded pair.

Every caller (commands, screens, page, endpoint, the engine's process) submits a ``Request`` here. The model is loaded
with the first request, unloaded when it is idle, loaded again where its process or device was lost, and switched while
others ask. Knows backends by their protocol only; refuses to know files, engines and screens.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NamedTuple

from dflash_local.errors import (
    BusyError,
    DeviceLostError,
    DFlashError,
    EngineError,
    ExactnessError,
    Interrupted,
    NumericsError,
    PromptError,
    UnknownModelError,
    UsageError,
)
from dflash_local.events import Event, LoadProgress, Notice, Queued, Started
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts, nothing_done
from dflash_local.request import Request, SamplingParams
from dflash_local.service.backend import Backend, Find, Model, State, Status
from dflash_local.service.ticket import Ticket

MAX_QUEUE = 8
KEEP_ALIVE_S = 30 * 60.0
CLOSE_S = 30.0  # a cycle or a prefill chunk ends well within this
BREAK_OFF_S = 5.0  # a load may take longer to notice that it is not wanted any more
WAIT_S = 0.25  # a lock waited for without limit cannot be interrupted by Ctrl-C on every system


class Outcome(NamedTuple):
    """How a request ended: without an error when ``Finished`` was published.

    Attributes:
        broke: the backend cannot be used any more. started: the reply had begun.
    """

    error: DFlashError | None
    trace: TracebackType | None
    broke: bool
    started: bool


class Service:
    """One model, in memory while it is used. Every method may be called from any thread.

    Args:
        model: the first one; it is loaded by the first request, or by ``load``.
        find: returns what a name means, loaded as asked for or as the program was started; raises UnknownModelError.
        keep_alive_s: seconds without a request after which it is unloaded; 0 at once, None never.
        observe: called with every event of every request, from the worker: it must be quick.
        on_progress: called with how far a load is. max_queue: requests that may wait besides the running one.
        reloads: a pair whose process or device was lost is loaded again, once for a request.
    """

    def __init__(
        self,
        model: Model,
        find: Find | None = None,
        keep_alive_s: float | None = None,
        observe: Callable[[Request, Event], None] = lambda _request, _event: None,
        on_progress: Callable[[LoadProgress], None] = lambda _event: None,
        max_queue: int = MAX_QUEUE,
        reloads: bool = True,
    ) -> None:
        self.keep_alive_s = keep_alive_s
        self._model, self._find, self._observe, self._on_progress = model, find, observe, on_progress
        self._max_queue, self._reloads = max_queue, reloads
        self._changed = threading.Condition(threading.RLock())
        self._backend: Backend | None = None
        self._facts: SessionFacts | None = None
        self._error: DFlashError | None = None  # what broke the engine or the last load
        self._changing = False  # one thread at a time loads or unloads; all others wait
        self._loading: LoadProgress | None = None
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._callers = 0  # requests on their way to the queue
        self._counting = 0  # prompts that are only counted, beside the queue
        self._last: float | None = None
        self._idle_since = time.monotonic()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="dflash-service", daemon=True)
        self._worker.start()

    @classmethod
    def over(cls, backend: Backend, max_queue: int = MAX_QUEUE) -> Service:
        """Return a service over a pair that is loaded already, and is never loaded again."""
        service = cls(Model(backend.facts.target, lambda _progress: backend), max_queue=max_queue, reloads=False)
        service.load()
        return service

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def model(self) -> Model:
        """The model that requests go to, loaded or not."""
        return self._model

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def sampling(self) -> SamplingParams:
        """The model's own, for requests that do not say."""
        return self._model.sampling

    @property
    def facts(self) -> SessionFacts | None:
        """What was loaded, and how; of the last time when it is not loaded now, None before the first."""
        backend = self._backend
        return backend.facts if backend is not None else self._facts

    @property
    def fault(self) -> DFlashError | None:
        """What broke the engine or the last load."""
        return self._error

    @property
    def status(self) -> Status:
        """How it is at this moment."""
        with self._changed:
            since = None if self._last is None else time.monotonic() - self._last
            state: State = "ready" if self._backend is not None else "unloaded"
            if self._loading is not None:
                state = "loading"
            elif self._error is not None:
                state = "broken"
            waiting = len(self._waiting) + self._callers
            running = int(self._running is not None)
            return Status(self._model.name, state, running, waiting, since, self._loading, self._error)

    def submit(self, request: Request, model: str | None = None) -> Ticket:
        """Queue a request, after loading the model if need be; waits for the load.

        Args:
            model: the name that the request was checked for; another model may have come since.

        Raises:
            BusyError: as many as may wait do so already. UnknownModelError: the model was switched.
            EngineError: closed. DFlashError: the load failed.
        """
        with self._loaded(model):
            waiting = len(self._waiting)
            if waiting >= self._max_queue:
                raise BusyError(f"{waiting} requests are waiting already, as many as may wait", "try again in a moment")
            ticket = Ticket(request, self._withdraw)
            self._waiting.append(ticket)
            ticket.publish(Queued(waiting + (self._running is not None)))
            self._changed.notify_all()
            return ticket

    def count(self, request: Request, model: str | None = None) -> int:
        """Return the tokens of a request's prompt, after loading the model if need be; waits for no reply.

        Raises:
            UsageError: the backend cannot tell. DFlashError: see ``submit``, or the prompt is refused.
        """
        with self._loaded(model):
            backend = self._backend
            self._counting += 1
        assert backend is not None  # it is loaded
        try:
            return backend.count(request)
        finally:
            with self._changed:
                self._counting -= 1
                self._idle_since = time.monotonic()

    @contextmanager
    def _loaded(self, model: str | None = None) -> Iterator[None]:
        """Load the model if need be, and hold the lock while it is usable; raises as ``submit`` does."""
        with self._changed:
            if not self._usable and self._callers >= self._max_queue:
                raise BusyError(f"{self._callers} requests wait for the model to load", "try again in a moment")
            self._callers += 1
        try:
            while True:
                self.load()
                with self._changed:
                    if self._usable:
                        if model is not None and not self._model.answers_to(model):
                            raise UnknownModelError(f"{model!r} is no longer served", f"this is {self._model.name}")
                        yield
                        return
        finally:
            with self._changed:
                self._callers -= 1
                self._idle_since = time.monotonic()
                self._changed.notify_all()

    def load(self) -> SessionFacts:
        """Have the model in memory, wait for it, and return how it is loaded; afresh where it broke.

        Raises:
            EngineError: closed. DFlashError: the load failed.
        """
        with self._changed:
            waited = self._await_turn()
            if waited and self._error is not None and self._backend is None:  # the load that this one waited for
                raise self._error
            if self._backend is not None and self._error is None:
                return self._backend.facts
            if self._error is not None and not self._reloads:
                raise EngineError(f"the session is broken: {self._error.message}", "load the model again")
            self._begin_change()
        return self._change(self._model, load=True)

    def unload(self) -> None:
        """Free the memory; what runs is cancelled. The next request loads it again.

        Raises:
            UsageError: another program keeps it loaded. EngineError: closed.
        """
        with self._changed:
            self._await_turn()
            if self._model.kept_by:
                raise UsageError(f"{self._model.kept_by} keeps {self.name} loaded", "end that to free its memory")
            if self._backend is None:
                return
            self._begin_change()
        self._change(self._model, load=False)

    def switch(self, name: str, load: LoadConfig | None = None) -> None:
        """Load another model in this one's place; what runs is cancelled. When that fails this one stays chosen.

        Args:
            load: how; also this one is loaded anew with it.

        Raises:
            UnknownModelError: no such model. DFlashError: the load failed.
        """
        if load is None and self._model.answers_to(name):
            self.load()
        elif self._find is None:
            raise UnknownModelError(f"unknown model {name!r}", f"this is {self._model.name}")
        else:
            self.switch_to(self._find(name, load))

    def switch_to(self, model: Model) -> SessionFacts:
        """See ``switch``."""
        with self._changed:
            self._await_turn()
            self._begin_change()
        return self._change(model, load=True)

    def close(self) -> None:
        """Cancel everything and unload for good; a load under way is broken off."""
        with self._changed:
            self._closed = True
            self._cancel_all()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._changing, BREAK_OFF_S)
            if self._changing:
                return
        if threading.current_thread() is not self._worker:
            self._worker.join(CLOSE_S)

    @property
    def _usable(self) -> bool:
        """True while a request can be queued (the lock is held)."""
        return self._backend is not None and not self._changing and self._error is None and not self._closed

    def _withdraw(self, ticket: Ticket) -> None:
        """End a cancelled ticket that has not begun, and free its place."""
        with self._changed:
            if ticket not in self._waiting:
                return
            self._waiting.remove(ticket)
            self._notify_positions()
            facts = self.facts
        if facts is not None:
            ticket.publish(nothing_done(facts, ticket.request))

    def _cancel_all(self) -> None:
        for ticket in [*self._waiting, *([self._running] if self._running else [])]:
            ticket.cancel()

    def _notify_positions(self) -> None:
        for index, ticket in enumerate(self._waiting):
            ticket.publish(Queued(index + (self._running is not None)))

    # changes: a load, an unload, a switch

    def _await_turn(self) -> bool:
        """Wait until nobody loads or unloads (the lock is held); True when there was something to wait for."""
        waited = False
        while self._changing and not self._closed:
            waited = True
            self._changed.wait(WAIT_S)
        if self._closed:
            raise EngineError("the session is closed", "the program is ending")
        return waited

    def _begin_change(self) -> None:
        """Make this thread the one that changes what is loaded (the lock is held), with no reply under way."""
        self._changing = True
        self._cancel_all()
        until = time.monotonic() + CLOSE_S
        with ExitStack() as stack:
            stack.callback(self._let_others)  # at Ctrl-C
            while self._running is not None and time.monotonic() < until:
                self._changed.wait(WAIT_S)
            stack.pop_all()

    def _let_others(self) -> None:
        self._changing = False

    def _change(self, model: Model, load: bool) -> SessionFacts:
        """Close what is loaded, load the model if wanted, and let the others in again."""
        stale, self._backend = self._backend, None
        error: DFlashError | None = self._error
        backend: Backend | None = None
        try:
            if load:
                error = EngineError("the load ended without a result", "see the server's messages")
                self._loading, self._last = LoadProgress("waiting", 0.0), time.monotonic()
            if stale is not None:
                self._facts = stale.facts
                stale.close()
            if load:
                backend, error = model.load(partial(self._progress, model.name)), None
        except DFlashError as raised:
            error = raised
            raise
        finally:
            with self._changed:
                self._backend, self._error = backend, error
                if backend is not None:
                    self._model, self._facts = model, backend.facts
                self._loading, self._changing = None, False
                self._last = self._idle_since = time.monotonic()
                self._changed.notify_all()
        assert self._facts is not None  # something was loaded, now or before
        return self._facts

    def _progress(self, name: str, event: LoadProgress) -> None:
        if self._closed:
            raise Interrupted("the load was broken off")
        self._loading, self._last = event, time.monotonic()
        self._on_progress(replace(event, stage=f"loading {name}: {event.stage}"))

    # the worker

    def _work(self) -> None:
        try:
            while (ticket := self._next()) is not None:
                outcome = self._answer(ticket)
                if isinstance(outcome.error, DeviceLostError) and self._reloads:
                    traceback.clear_frames(outcome.trace)  # they hold what lies on the device
                    outcome = self._answer_again(ticket, outcome, outcome.error.message)
                if outcome.error is not None:
                    self._fail(ticket, outcome.error, outcome.broke)
                with self._changed:
                    self._running = None
                    self._last = self._idle_since = time.monotonic()
                    self._changed.notify_all()
                # Its frames hold the prompt and, through the ticket, the error itself: a circle that stays for long.
                traceback.clear_frames(outcome.trace)
                del ticket, outcome
        finally:
            self._abandon()
        backend, self._backend = self._backend, None
        if backend is not None:
            self._facts = backend.facts
            backend.close()

    def _next(self) -> Ticket | None:
        """Wait for a request and make it the running one; None at the end. Unloads meanwhile what nobody uses."""
        while True:
            with self._changed:
                if self._closed and not self._changing:
                    return None
                if self._waiting and not self._changing:
                    self._running = self._waiting.popleft()
                    self._notify_positions()
                    return self._running
                idle = self._idle_left()
                if idle is None or idle > 0:
                    self._changed.wait(WAIT_S if idle is None else min(idle, WAIT_S))
                    continue
                self._begin_change()
            self._change(self._model, load=False)

    def _idle_left(self) -> float | None:
        """Seconds until the model has been idle long enough; None while it is not loaded or in use."""
        if self._backend is None or self._changing or self.keep_alive_s is None or self._closed:
            return None
        if self._callers or self._counting:
            return None
        return self._idle_since + self.keep_alive_s - time.monotonic()

    def _abandon(self) -> None:
        """Fail those who still wait, if there are any: the worker ends, nobody is left to answer them."""
        with self._changed:
            left = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            self._running = None
            if not self._closed:
                self._error = self._error or EngineError("the worker of the session died")
                self._closed = True
        for ticket in left:
            ticket.fail(EngineError("the worker of the session died", "load the model again"))

    def _fail(self, ticket: Ticket, error: DFlashError, broke: bool) -> None:
        """End a request with its error; those that wait for a broken backend end with it."""
        queued: list[Ticket] = []
        if broke:
            with self._changed:
                self._error = error
                queued = list(self._waiting)
                self._waiting.clear()
        ticket.fail(error)
        for each in queued:
            each.fail(EngineError(f"the session is broken: {error.message}", "send it again"))

    def _answer_again(self, ticket: Ticket, lost: Outcome, cause: str) -> Outcome:
        """Load the pair afresh; a request whose reply had not begun is answered then."""
        ticket.publish(Notice(f"{cause}; the pair is loaded again", "warning"))
        with self._changed:
            if self._changing or self._closed:  # another thread waits for this reply to end, and loads then
                return Outcome(DeviceLostError(cause, "send it again"), None, True, lost.started)
            self._changing = True
        try:
            self._change(self._model, load=True)
        except (DFlashError, RuntimeError, MemoryError, OSError) as fault:
            message, hint = (fault.message, fault.hint) if isinstance(fault, DFlashError) else (str(fault), "")
            error = DeviceLostError(f"{cause}; it cannot be loaded again: {message}", hint or "start the program again")
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
            assert self._backend is not None  # nothing changes while a request runs
            events = self._backend.generate(ticket.request, lambda: ticket.cancelled)
            begun = True
            for event in events:
                started = started or isinstance(event, Started)
                self._last = time.monotonic()
                self._observe(ticket.request, event)
                ticket.publish(event)
            if not ticket.done:
                error = EngineError("the engine ended a reply without saying why")
        except DFlashError as raised:
            error, trace = raised, raised.__traceback__
        except BaseException as raised:  # a named broad one: an unknown fault, or a library's panic, ends no worker
            kind, what = (EngineError, "the engine failed") if begun else (PromptError, "the prompt cannot be prepared")
            error = kind(f"{what}: {type(raised).__name__}: {raised}", "run again with --debug for the traceback")
            error.__cause__, trace = raised, raised.__traceback__
        # A request that failed by its own input, logits or memory leaves the backend healthy.
        broke = begun and isinstance(error, EngineError) and not isinstance(error, (NumericsError, ExactnessError))
        return Outcome(error, trace, broke, started)
