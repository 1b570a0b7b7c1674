"""Keeps one pair in memory: loads it at the first request, once, and unloads it when it is idle.

Knows the service and a way to load that is passed in; refuses to know files, engines and screens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dflash_local.chat.tool_calls import GENERAL_FORM, CallFormat
from dflash_local.errors import BusyError, DFlashError, EngineError, UnknownModelError, UsageError
from dflash_local.events import Event, LoadProgress, Mode
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.request import Request, SamplingParams
from dflash_local.service.service import MAX_QUEUE, Service, Session, Ticket
from dflash_local.service.wrapped import Observer, WatchedSession

KEEP_ALIVE_S = 30 * 60.0
CLOSE_S = 5.0
WAIT_S = 0.25  # a lock waited for without limit cannot be interrupted by Ctrl-C on every system

State = Literal["ready", "loading", "unloaded", "broken"]
Load = Callable[[Callable[[LoadProgress], None]], Session]
Find = Callable[[str, LoadConfig | None], "Model"]


@dataclass(frozen=True, slots=True)
class Model:
    """A pair that can be loaded, and what is known of it without loading.

    Attributes:
        load: loads it, telling how far it is. The session's ``close`` gives back all that was taken.
        aliases: other names that mean it.
        sampling, thinking, mode: for requests that do not set it: as its authors advise; ``ar`` without a drafter.
        call_format: how it writes tool calls (``chat.tool_calls.format_of``).
        context: tokens that it would hold once loaded; None where only the load knows.
        kept_by: what keeps it loaded, where that is not this program: it is not unloaded then.
        lost: why a loaded session cannot be used any more, where that is found outside of a request; or None.
    """

    name: str
    load: Load
    aliases: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool = False
    mode: Mode = "dflash"
    call_format: CallFormat = GENERAL_FORM
    context: int | None = None
    kept_by: str = ""
    lost: Callable[[], DFlashError | None] = lambda: None

    def answers_to(self, name: str) -> bool:
        """True when ``name`` means this model; case does not matter."""
        return name.casefold() in {known.casefold() for known in (self.name, *self.aliases)}


@dataclass(frozen=True, slots=True)
class Status:
    """How the resident pair is.

    Attributes:
        running, waiting: requests. progress: of the load under way, None otherwise.
        last_progress_s: seconds since the engine or the loader last reported something; None before it did.
        error: what broke the engine or the last load.
    """

    model: str
    state: State
    running: int
    waiting: int
    last_progress_s: float | None
    progress: LoadProgress | None
    error: DFlashError | None


class Resident:
    """One model, in memory while it is used. Every method may be called from any thread.

    Args:
        model: the first one; it is loaded by the first request, or by ``load``.
        find: what a name means, loaded as asked for or as the program was started; raises UnknownModelError.
        keep_alive_s: seconds without a request after which it is unloaded; 0 at once, None never.
        observe: called with every event of every request, from the worker: it must be quick.
    """

    def __init__(
        self,
        model: Model,
        find: Find | None = None,
        keep_alive_s: float | None = KEEP_ALIVE_S,
        observe: Observer = lambda _request, _event: None,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        self.keep_alive_s = keep_alive_s
        self._model, self._find, self._observe, self._max_queue = model, find, observe, max_queue
        self._changed = threading.Condition()
        self._service: Service | None = None
        self._watched: WatchedSession | None = None
        self._facts: SessionFacts | None = None
        self._changing = False  # one thread at a time loads or unloads; all others wait
        self._loading: LoadProgress | None = None
        self._error: DFlashError | None = None
        self._tickets: list[Ticket] = []
        self._callers = 0  # requests on their way to the service
        self._last: float | None = None
        self._idle_since = time.monotonic()
        self._closed = False
        if keep_alive_s is not None:
            threading.Thread(target=self._tidy, name="dflash-keep-alive", daemon=True).start()

    @property
    def model(self) -> Model:
        """The model that requests go to, loaded or not."""
        return self._model

    @property
    def name(self) -> str:
        """Of the model."""
        return self._model.name

    @property
    def sampling(self) -> SamplingParams:
        """The model's own, for requests that do not say."""
        return self._model.sampling

    @property
    def facts(self) -> SessionFacts | None:
        """What was loaded, and how; of the last time when it is not loaded now, None before the first."""
        service = self._service
        return service.facts if service is not None else self._facts

    @property
    def status(self) -> Status:
        """How it is at this moment."""
        with self._changed:
            live = sum(not ticket.done for ticket in self._tickets) + self._callers
            running = int(self._watched is not None and self._watched.active)
            since = None if self._last is None else time.monotonic() - self._last
            error = self._fault()
            state: State = "ready" if self._service is not None else "unloaded"
            if self._loading is not None:
                state = "loading"
            elif error is not None:
                state = "broken"
            waiting = max(live - running, 0)
            return Status(self._model.name, state, running, waiting, since, self._loading, error)

    def submit(self, request: Request, model: str | None = None) -> Ticket:
        """Queue a request, after loading the model if need be; waits for the load.

        Args:
            model: the name that the request was checked for; another model may have come since.

        Raises:
            BusyError: as many as may wait do so already. UnknownModelError: the model was switched.
            EngineError: closed. DFlashError: the load failed.
        """
        with self._changed:
            loaded = self._service is not None and not self._changing
            if not loaded and self._callers >= self._max_queue:
                raise BusyError(f"{self._callers} requests wait for the model to load", "try again in a moment")
            self._callers += 1
        try:
            while True:
                self.load()
                with self._changed:
                    if self._service is not None and not self._changing and self._fault() is None:
                        return self._submit(self._service, request, model)
        finally:
            with self._changed:
                self._callers -= 1
                self._idle_since = time.monotonic()
                self._changed.notify_all()

    def load(self) -> None:
        """Have the model in memory, and wait for it, afresh where it broke; EngineError when closed, or the error."""
        with self._changed:
            waited = self._await_turn()
            if waited and self._error is not None:  # the load that this one waited for
                raise self._error
            if self._service is not None and self._fault() is None:
                return
            stale = self._take()
        self._change(stale, self._model, load=True)

    def unload(self) -> None:
        """Give the memory back; what runs is cancelled. The next request loads it again.

        Raises:
            UsageError: another program keeps it loaded.
        """
        with self._changed:
            self._await_turn()
            if self._model.kept_by:
                raise UsageError(f"{self._model.kept_by} keeps {self.name} loaded", "end that to free its memory")
            if self._service is None:
                return
            stale = self._take()
        self._change(stale, self._model, load=False)

    def switch(self, name: str, load: LoadConfig | None = None) -> None:
        """Load another model in this one's place; what runs is cancelled. When that fails this one stays chosen.

        Args:
            load: how; also this one is loaded anew with it.

        Raises:
            UnknownModelError: no such model. DFlashError: the load failed.
        """
        if load is None and self._model.answers_to(name):
            return self.load()
        if self._find is None:
            raise UnknownModelError(f"unknown model {name!r}", f"this is {self._model.name}")
        model = self._find(name, load)
        with self._changed:
            self._await_turn()
            stale = self._take()
        self._change(stale, model, load=True)

    def close(self) -> None:
        """Cancel everything and unload for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._changing, CLOSE_S)  # a load cannot be broken off
            service, self._service, self._watched = self._service, None, None
        if service is not None:
            service.close()

    def _submit(self, service: Service, request: Request, model: str | None) -> Ticket:
        if model is not None and not self._model.answers_to(model):
            raise UnknownModelError(f"{model!r} is no longer served", f"this is {self._model.name}")
        ticket = service.submit(request)
        self._tickets = [*(old for old in self._tickets if not old.done), ticket]
        return ticket

    def _fault(self) -> DFlashError | None:
        """What broke the engine or the last load (the lock is held)."""
        if self._service is None:
            return self._error
        return self._service.fault or self._model.lost() or self._error

    def _await_turn(self) -> bool:
        """Wait until nobody loads or unloads (the lock is held); True when there was something to wait for."""
        waited = False
        while self._changing and not self._closed:
            waited = True
            self._changed.wait(WAIT_S)
        if self._closed:
            raise EngineError("the session is closed", "the program is ending")
        return waited

    def _take(self) -> Service | None:
        """Begin a change (the lock is held): the service goes to this thread, which calls ``_change``."""
        self._changing = True
        self._error = self._fault()
        stale, self._service, self._watched = self._service, None, None
        return stale

    def _change(self, stale: Service | None, model: Model, load: bool) -> None:
        """Close the old service, load the model if wanted, and let the others in again."""
        error: DFlashError | None = self._error
        service: Service | None = None
        try:
            if load:
                error = EngineError("the load ended without a result", "see the server's messages")
                self._progress(LoadProgress("waiting", 0.0))
            if stale is not None:
                stale.close()
            if load:
                service = Service(self._open(model), self._max_queue, load_again=lambda: self._open_again(model))
                error = None
        except DFlashError as raised:
            error = raised
            raise
        finally:
            with self._changed:
                self._service, self._error = service, error
                if service is not None:
                    self._model, self._facts = model, service.facts
                self._loading, self._changing = None, False
                self._last = self._idle_since = time.monotonic()
                self._changed.notify_all()

    def _open(self, model: Model) -> WatchedSession:
        self._watched = WatchedSession(model.load(self._progress), self._happened, self._ended)
        return self._watched

    def _open_again(self, model: Model) -> WatchedSession:
        """In a request: the model's process or device was lost."""
        try:
            return self._open(model)
        finally:
            self._loading = None

    def _progress(self, event: LoadProgress) -> None:
        self._loading, self._last = event, time.monotonic()

    def _happened(self, request: Request, event: Event) -> None:
        self._last = time.monotonic()
        self._observe(request, event)

    def _ended(self) -> None:
        with self._changed:
            self._last = self._idle_since = time.monotonic()
            self._changed.notify_all()

    def _tidy(self) -> None:
        """The keep-alive thread: unloads what nobody used for so long."""
        while True:
            with self._changed:
                if self._closed:
                    return
                left = self._idle_left()
                if left is None or left > 0:
                    self._changed.wait(WAIT_S if left is None else min(left, WAIT_S))
                    continue
                stale = self._take()
            self._change(stale, self._model, load=False)

    def _idle_left(self) -> float | None:
        """Seconds until the model has been idle long enough; None while it is not loaded or in use."""
        busy = self._callers or any(not ticket.done for ticket in self._tickets)
        if self._service is None or self._changing or busy or self.keep_alive_s is None:
            return None
        return self._idle_since + self.keep_alive_s - time.monotonic()
