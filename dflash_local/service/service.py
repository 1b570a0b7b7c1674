"""Serves one model: requests that take turns, the thread that answers them, and the life of the loaded pair.

Every caller (commands, screens, page, endpoint, the engine's process) submits a ``Request`` here. A backend that orders
replies itself, as the engine's process with a service of its own does, is handed all of them at once. The model is
loaded with the first request, unloaded when it is idle, loaded again where its process or device was lost, and switched
while others ask. Knows backends by their protocol only; refuses to know files, engines and screens.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from dflash_local.errors import (
    BusyError,
    DeviceLostError,
    DFlashError,
    EngineError,
    Interrupted,
    UnknownModelError,
    UsageError,
)
from dflash_local.events import Event, LoadProgress, Notice
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import HeldCount, SessionFacts, nothing_done
from dflash_local.request import Request, SamplingParams
from dflash_local.service.answering import Outcome, answer
from dflash_local.service.backend import Backend, Find, Model, State, Status
from dflash_local.service.ticket import Ticket
from dflash_local.service.turns import Turns

MAX_QUEUE = 8
KEEP_ALIVE_S = 30 * 60.0
CLOSE_S = 30.0  # a cycle or a prefill chunk ends well within this
BREAK_OFF_S = 5.0  # a load may take longer to notice that it is not wanted any more
WAIT_S = 0.25  # a lock waited for without limit cannot be interrupted by Ctrl-C on every system


class Service:
    """One model, in memory while it is used. Every method may be called from any thread.

    Args:
        model: the first one; it is loaded by the first request, or by ``load``.
        find: returns what a name means, loaded as asked for or as the program was started; raises UnknownModelError.
        keep_alive_s: seconds without a request after which it is unloaded; 0 at once, None never.
        observe: called with every event of every request, from the worker: it must be quick.
        on_progress: called with how far a load is. max_queue: requests that may wait besides the running one.
        reloads: a pair whose process or device was lost is loaded again, once for a request.
        clock: seconds, by which turns are measured.
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
        clock: Callable[[], float] = time.monotonic,
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
        self._turns = Turns(clock)
        self._callers = 0  # requests on their way to the queue
        self._counting = 0  # prompts that are only counted, beside the queue
        self._last: float | None = None
        self._idle_since = time.monotonic()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="dflash-service", daemon=True)
        self._worker.start()

    @classmethod
    def over(cls, backend: Backend, max_queue: int = MAX_QUEUE, clock: Callable[[], float] = time.monotonic) -> Service:
        """Return a service over a pair that is loaded already, and is never loaded again."""
        model = Model(backend.facts.target, lambda _progress: backend)
        service = cls(model, max_queue=max_queue, reloads=False, clock=clock)
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
            if self._loading is not None or self._error is not None:
                state = "broken" if self._loading is None else "loading"
            running, waiting, aside = self._turns.counts()
            name, waiting = self._model.name, waiting + self._callers
            return Status(name, state, running, waiting, aside, since, self._loading, self._error)

    def submit(self, request: Request, model: str | None = None) -> Ticket:
        """Queue a request, after loading the model if need be; waits for the load.

        Args:
            model: the name that the request was checked for; another model may have come since.

        Raises:
            BusyError: as many as may wait do so already. UnknownModelError: the model was switched.
            EngineError: closed. DFlashError: the load failed.
        """
        with self._loaded(model):
            if len(self._turns) > (most := self._max_queue):
                raise BusyError(f"{most} requests are waiting already, as many as may wait", "try again in a moment")
            ticket = Ticket(request, self._withdraw)
            self._turns.add(ticket, self._hands_on)
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

    def held(self) -> tuple[HeldCount, ...]:
        """Count the conversations that the loaded pair can go on from; none where it is not loaded, or lost."""
        backend = self._backend
        return () if backend is None else backend.held()

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

    @property
    def _hands_on(self) -> bool:
        """True where the backend orders replies itself."""
        return self._backend is not None and self._backend.set_aside is None

    def _withdraw(self, ticket: Ticket) -> None:
        """End a cancelled ticket that has not begun, and free its place; the worker ends one that was set aside."""
        with self._changed:
            self._changed.notify_all()
            if ticket not in self._turns.waiting or ticket.events is not None:
                return
            self._turns.waiting.remove(ticket)
            self._turns.notify()
            facts = self.facts
        if facts is not None:
            ticket.publish(nothing_done(facts, ticket.request))

    def _cancel_all(self) -> None:
        for ticket in self._turns.all:
            ticket.cancel()

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
        with ExitStack() as stack:
            stack.callback(setattr, self, "_changing", False)  # at Ctrl-C
            self._await_replies()
            stack.pop_all()

    def _await_replies(self) -> None:
        """Wait until no reply is under way (the lock is held)."""
        until = time.monotonic() + CLOSE_S
        while (self._turns.running or self._turns.set_aside) and time.monotonic() < until:
            self._changed.wait(WAIT_S)

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
                if self._hands_on:
                    threading.Thread(target=self._serve, args=(ticket,), daemon=True).start()
                else:
                    self._serve(ticket)
                del ticket
        finally:
            self._abandon()
        backend, self._backend = self._backend, None
        if backend is not None:
            self._facts = backend.facts
            backend.close()

    def _serve(self, ticket: Ticket) -> None:
        """Answer a request, or as much of it as its turn allows."""
        backend = self._backend
        outcome = answer(ticket, backend, self._note, self._gives_way)
        if outcome is not None and isinstance(outcome.error, DeviceLostError) and self._reloads:
            traceback.clear_frames(outcome.trace)  # they hold what lies on the device
            failed = self._load_again(ticket, backend, outcome.error.message)
            outcome = failed or answer(ticket, self._backend, self._note, self._gives_way)
        if outcome is None:
            return
        if outcome.error is not None:
            self._fail(ticket, outcome.error, outcome.broke)
        with self._changed:
            self._turns.running.remove(ticket)
            self._last = self._idle_since = time.monotonic()
            self._changed.notify_all()
        # Its frames hold the prompt and, through the ticket, the error itself: a circle that stays for long.
        traceback.clear_frames(outcome.trace)
        del ticket, outcome

    def _next(self) -> Ticket | None:
        """Wait for a request and begin its turn; None at the end. Unloads meanwhile what nobody uses."""
        while True:
            self._end_cancelled()
            with self._changed:
                turns = self._turns
                if self._closed and not (self._changing or len(turns)):
                    return None
                if turns.waiting and not self._changing and not self._closed:
                    return turns.next()
                idle = self._idle_left()
                if idle is None or idle > 0:
                    if not any(ticket.cancelled for ticket in turns.set_aside):
                        self._changed.wait(WAIT_S if idle is None else min(idle, WAIT_S))
                    continue
                self._begin_change()
            self._change(self._model, load=False)

    def _end_cancelled(self) -> None:
        """End those that were set aside and are cancelled."""
        with self._changed:
            cancelled = self._turns.take_cancelled()
        for ticket in cancelled:
            self._serve(ticket)

    def _idle_left(self) -> float | None:
        """Seconds until the model has been idle long enough; None while it is not loaded or in use."""
        if self._backend is None or self._changing or self.keep_alive_s is None or self._closed:
            return None
        if self._callers or self._counting or len(self._turns):
            return None
        return self._idle_since + self.keep_alive_s - time.monotonic()

    def _abandon(self) -> None:
        """Fail those who still wait, if there are any: the worker ends, nobody is left to answer them."""
        with self._changed:
            left = [*self._turns.running, *self._turns.take_waiting()]
            self._turns.running.clear()
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
                queued = self._turns.take_waiting()
        ticket.fail(error)
        kind = DeviceLostError if isinstance(error, DeviceLostError) else EngineError  # then it can be asked again
        for each in queued:
            each.fail(kind(f"the session is broken: {error.message}", "send it again"))

    def _load_again(self, ticket: Ticket, backend: Backend | None, cause: str) -> Outcome | None:
        """Load a lost pair afresh, once for all that had it; None for a request that can be answered by it, as its
        reply had not begun.
        """
        ticket.publish(Notice(f"{cause}; the pair is loaded again", "warning"))
        failed: list[Ticket] = []
        with self._changed:
            self._turns.running.remove(ticket)  # who loads waits until nothing runs
            self._changed.notify_all()
            while self._changing and not self._closed:
                self._changed.wait(WAIT_S)
            mine = self._backend is backend and not self._closed
            if mine:
                self._changing = True
                failed = self._turns.begin_anew()
                self._await_replies()
        for each in failed:
            each.fail(DeviceLostError(cause, "send it again"))
        if mine:
            try:
                self._change(self._model, load=True)
            except (DFlashError, RuntimeError, MemoryError, OSError) as fault:
                self._error = fault if isinstance(fault, DFlashError) else DeviceLostError(str(fault))
        with self._changed:
            self._turns.running.append(ticket)
            lost = self._backend is None or ticket.cancelled
            error = self._error if self._backend is None else None
        if error is not None:
            message, hint = f"{cause}; it cannot be loaded again: {error.message}", error.hint
            return Outcome(DeviceLostError(message, hint or "start the program again"), broke=True)
        if lost or ticket.started:  # lost: another thread unloads it, or loads another one
            again = "" if lost else "; the pair was loaded again"
            return Outcome(DeviceLostError(f"{cause}{again}", "send it again"))
        return None

    def _note(self, request: Request, event: Event) -> None:
        self._last = time.monotonic()
        self._observe(request, event)

    def _gives_way(self, ticket: Ticket, set_aside: Callable[[], bool] | None) -> bool:
        """End the turn of the running request where it is over, and its reply can be set aside."""
        if set_aside is None:
            return False
        self._end_cancelled()
        if ticket.done or ticket.cancelled or self._changing or not self._turns.is_over(ticket):
            return False
        began = self._turns.clock()
        if not set_aside():
            self._turns.begin()
            return False
        with self._changed:
            ticket.switch_s = self._turns.clock() - began
            self._turns.yield_turn(ticket)
        return True
