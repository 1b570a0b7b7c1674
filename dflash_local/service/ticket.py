"""A submitted request: a bounded mailbox of its events that merges ``Step`` events when its reader is slow.

The worker puts and never waits; the reader loses no token and no text, only the cycle borders.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dflash_local.errors import DFlashError
from dflash_local.events import (
    Channel,
    Event,
    Finished,
    Notice,
    Origin,
    Piece,
    PrefillProgress,
    Queued,
    Step,
    TokenLogprob,
)
from dflash_local.request import Request

CAPACITY = 64
WAIT_S = 0.5  # a lock waited for without limit cannot be interrupted by Ctrl-C on every system


@dataclass(slots=True)
class _Merged:
    """Several ``Step`` events on their way to becoming one."""

    runs: list[tuple[Channel, Origin, list[str]]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    rows: int = 0
    t_s: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    experts: float | None = None
    copied: int = 0
    mtp: int = 0

    def add(self, step: Step) -> None:
        for piece in step.pieces:
            if self.runs and self.runs[-1][:2] == (piece.channel, piece.origin):
                self.runs[-1][2].append(piece.text)
            else:
                self.runs.append((piece.channel, piece.origin, [piece.text]))
        self.token_ids.extend(step.token_ids)
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.drafts += step.drafts if step.drafted else 0
        self.rows += step.rows
        self.t_s = step.t_s
        self.logprobs.extend(step.logprobs)
        self.experts = self.experts if step.experts is None else step.experts
        self.copied += step.copied
        self.mtp += step.mtp

    def as_step(self) -> Step:
        pieces = tuple(Piece("".join(texts), channel, origin) for channel, origin, texts in self.runs)
        ids, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        counts = self.drafted, self.accepted, self.rows
        sources = self.copied, self.mtp
        return Step(pieces, ids, *counts, self.t_s, logprobs, self.drafts, self.experts, *sources)


class Ticket:
    """One submitted request: an iterator over its events, and the way to cancel it.

    It raises the request's error where it ended with one. When ``capacity`` events wait, a further ``Step`` is merged
    into the newest waiting one, and a further ``Notice`` replaces the oldest. Progress events replace their
    predecessor. It is an object and not a generator, so that a reader interrupted by Ctrl-C can go on reading.

    Attributes:
        done: nothing follows. position: requests before it; 0 while it runs. begun: its prompt is being processed.
        started: it is. events: its reply, once that is asked for. switch_s: what setting it aside took.
    """

    def __init__(self, request: Request, withdraw: Callable[[Ticket], None], capacity: int = CAPACITY) -> None:
        self.request = request
        self._withdraw = withdraw
        self._cancelled = threading.Event()
        self._capacity = max(1, capacity)
        self._waiting: deque[Event | _Merged] = deque()
        self._changed = threading.Condition()  # of a lock that Ctrl-C may take again: it cancels inside
        self.done = self.begun = self.started = False
        self.position = 0
        self.events: Iterator[Event] | None = None
        self.switch_s = 0.0
        self._error: DFlashError | None = None

    def cancel(self) -> None:
        """Stop the reply within one cycle, or leave the queue; ends as ``Finished('cancelled')``."""
        self._cancelled.set()
        self._withdraw(self)

    @property
    def cancelled(self) -> bool:
        """True when ``cancel`` was called, whether or not it came in time."""
        return self._cancelled.is_set()

    def publish(self, event: Event) -> None:
        """Add an event; never waits for the reader. ``Finished`` is the last."""
        with self._changed:
            if self.done:
                return
            if isinstance(event, Step):
                self._put_step(event)
            elif isinstance(event, (Queued, PrefillProgress)) and self._last_is(type(event)):
                self._waiting[-1] = event
            else:
                if isinstance(event, Notice) and len(self._waiting) >= self._capacity:
                    self._drop_oldest_notice()
                self._waiting.append(event)
            self.done = isinstance(event, Finished)
            if isinstance(event, Queued):
                self.position = event.position
            elif not isinstance(event, Notice):
                self.position, self.begun = 0, True
                self.started = self.started or not isinstance(event, PrefillProgress)
            self._changed.notify_all()

    def fail(self, error: DFlashError) -> None:
        """End the request with an error: the reader gets what waits, and then the error."""
        with self._changed:
            if not self.done:
                self.done, self._error = True, error
                self._changed.notify_all()

    def __iter__(self) -> Ticket:
        return self

    def __next__(self) -> Event:
        with self._changed:
            while not self._waiting:
                if self.done:
                    if self._error is not None:
                        raise self._error
                    raise StopIteration
                self._changed.wait(WAIT_S)
            event = self._waiting.popleft()
        return event.as_step() if isinstance(event, _Merged) else event

    def _last_is(self, kind: type) -> bool:
        return bool(self._waiting) and isinstance(self._waiting[-1], kind)

    def _put_step(self, step: Step) -> None:
        if len(self._waiting) < self._capacity:
            self._waiting.append(step)
            return
        for index in range(len(self._waiting) - 1, -1, -1):
            waiting = self._waiting[index]
            if isinstance(waiting, Step):
                merged = _Merged()
                merged.add(waiting)
                self._waiting[index] = waiting = merged
            if isinstance(waiting, _Merged):
                waiting.add(step)
                return
        self._waiting.append(step)

    def _drop_oldest_notice(self) -> None:
        for index, waiting in enumerate(self._waiting):
            if isinstance(waiting, Notice):
                del self._waiting[index]
                return
