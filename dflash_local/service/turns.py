"""Whose turn it is on a device that answers one request at a time: round robin, by slices of time.

A reply has the device for ``SLICE_S`` seconds, or ``SHARE`` times as long as setting it aside took the last time where
that is more. Then it is set aside at its next border, behind a cycle or a chunk of its prompt, if another request
waits, and goes to the end of the queue. So one that had the device for long gives way at once, a short one is
answered within a slice, and none starves: of n requests each waits, before its first turn and between two of them, at
most n - 1 times as long as a slice, a border and a switch take together. A border comes when a cycle, a chunk, or the
preparation of a prompt has ended; a switch is a copy of one reply's caches to the host and of another's back. The
bound holds among replies that can be set aside: one that cannot has the device to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dflash_local.events import Queued
from dflash_local.service.ticket import Ticket

SLICE_S = 1.0
SHARE = 20  # bringing back takes as long as setting aside: of all the time at most a tenth


class Turns:
    """The requests of a service. What changes or reads several of them wants its lock held.

    Attributes:
        waiting: in the order of their turns, those that are set aside among them. running: one, or all that a backend
            was handed that orders them itself.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []
        self.clock = clock
        self._since = 0.0  # when the present turn began

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def all(self) -> list[Ticket]:
        return [*self.running, *self.waiting]

    @property
    def set_aside(self) -> list[Ticket]:
        """Those that have begun and wait for another turn."""
        return [each for each in self.waiting if each.events is not None]

    def counts(self) -> tuple[int, int, int]:
        """Count those that run, wait and are set aside, here or where they were handed to."""
        running = sum(each.position == 0 for each in self.running)
        aside = sum(each.position > 0 and each.begun for each in self.all)
        return running, len(self) - running - aside, aside

    def add(self, ticket: Ticket, handed_on: bool) -> None:
        """Queue a request. ``handed_on``: it waits elsewhere, if at all."""
        self.waiting.append(ticket)
        ticket.publish(Queued(0 if handed_on else len(self) - 1))

    def next(self) -> Ticket:
        """Begin the turn of the first one."""
        ticket = self.waiting.popleft()
        self.running.append(ticket)
        if ticket.position:
            ticket.publish(Queued(0))
        self.notify()
        self.begin()
        return ticket

    def begin(self) -> None:
        """Begin a turn, or another slice of it."""
        self._since = self.clock()

    def is_over(self, ticket: Ticket) -> bool:
        """Return whether the running one has had its slice, and another waits."""
        return bool(self.waiting) and self.clock() - self._since >= max(SLICE_S, SHARE * ticket.switch_s)

    def yield_turn(self, ticket: Ticket) -> None:
        """Put the running one, which was set aside, at the end."""
        self.running.remove(ticket)
        self.waiting.append(ticket)
        self.notify()

    def take_cancelled(self) -> list[Ticket]:
        """Let those run that were set aside and are cancelled: they need no turn to end."""
        found = [each for each in self.set_aside if each.cancelled]
        for each in found:
            self.waiting.remove(each)
        self.running += found
        return found

    def take_waiting(self) -> list[Ticket]:
        """Give up all that wait."""
        found = list(self.waiting)
        self.waiting.clear()
        for each in found:
            each.events = None
        return found

    def begin_anew(self) -> list[Ticket]:
        """Forget what was set aside, as what it was set aside of is lost; returns those whose replies have begun."""
        begun = [each for each in self.set_aside if each.started]
        for each in self.set_aside:
            each.events = None
        for each in begun:
            self.waiting.remove(each)
        return begun

    def notify(self) -> None:
        """Tell those that wait how many are before them."""
        for index, ticket in enumerate(self.waiting):
            ticket.publish(Queued(index + bool(self.running)))
