"""Requests that take turns on one device, by a clock that is moved by what runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pytest

from dflash_local.errors import DeviceLostError, EngineError
from dflash_local.events import Event, Finished, Notice, PrefillProgress, Queued, Started, Step, Usage
from dflash_local.request import Limits, Request
from dflash_local.service.backend import Model, Status
from dflash_local.service.service import Service
from dflash_local.service.ticket import Ticket
from dflash_local.service.turns import SHARE, SLICE_S
from tests.service.scripted import STATS, ScriptedSession
from tests.service.test_service import finish, wait_until

STEP_S, SWITCH_S = 0.25, 0.03125  # a cycle, or a chunk of a prompt; what setting aside takes


def steps(count: int, chunks: int = 1) -> Request:
    return Request(prompt_ids=(1,) * chunks, limits=Limits(count))


@dataclass(slots=True)
class Device(ScriptedSession):
    """A request has as many chunks as prompt ids, and as many cycles as it may have tokens.

    Attributes:
        now: the clock. gate: what a first event waits for. log: whose each event was, and when. on_event: told of it.
        holder: whose sequence it has. refusals: what cannot be set aside yet. switch_s: what that takes.
    """

    now: float = 0.0
    log: list[tuple[Request, float]] = field(default_factory=list)
    on_event: Callable[[int], object] = lambda _count: None
    holder: Request | None = None
    refusals: int = 0
    switch_s: float = SWITCH_S

    def clock(self) -> float:
        return self.now

    def set_aside(self) -> bool:
        self.now += self.switch_s
        if self.refusals:
            self.refusals -= 1
            return False
        self.holder = None
        return True

    def _events(self, request: Request, cancelled: Callable[[], bool], fault: BaseException | None) -> Iterator[Event]:
        assert self.gate is None or self.gate.wait(60)
        done, reason = 0, self.end
        chunks, total = max(1, len(request.prompt_ids)), request.limits.max_new_tokens
        while done < chunks + total:
            if cancelled():
                reason = "cancelled"
                break
            assert self.holder in (None, request), "one at a time"
            self.holder, done = request, done + 1
            self.now += STEP_S
            self.log.append((request, self.now))
            self.on_event(len(self.log))
            if done <= chunks:
                yield PrefillProgress(done, chunks)
            else:
                yield Step((), (done,), 0, 0, 1, 0.0)
            if done == chunks:
                yield Started(chunks, 0, 0.0)
        if self.holder is request:
            self.holder = None
        if fault is not None:
            raise fault
        yield Finished(reason, Usage(chunks, max(0, done - chunks)), STATS)

    @property
    def order(self) -> list[tuple[int, int]]:
        """Cycles that requests may have, and the events of each turn."""
        return [(key, len(list(group))) for key, group in groupby(each.limits.max_new_tokens for each, _ in self.log)]


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(device: Device, **more: Any) -> Service:
        services.append(Service.over(device, clock=device.clock, **more))
        return services[-1]

    yield start
    for service in services:
        service.close()


def submit_all(device: Device, service: Service, *requests: Request) -> list[Ticket]:
    """All before the first of them has its first event."""
    device.gate = threading.Event()
    tickets = [service.submit(request) for request in requests]
    device.gate.set()
    return tickets


def longest_wait(device: Device, request: Request) -> float:
    times = [0.0, *(at - STEP_S for each, at in device.log if each is request)]
    return max(after - before - STEP_S * (before > 0) for before, after in zip(times, times[1:]))


def test_short_ones_pass_long_ones_and_nobody_waits_longer_than_the_bound(serve: Callable[..., Service]) -> None:
    device = Device()
    requests = [steps(60), steps(2), steps(25, chunks=9), steps(1), steps(40)]
    for ticket in submit_all(device, serve(device), *requests):
        assert finish(ticket)[1].reason == "stop"
    turn = int(SLICE_S / STEP_S)
    assert device.order[:7] == [(60, turn), (2, 3), (25, turn), (1, 2), (40, turn), (60, turn), (25, turn)]
    bound = (len(requests) - 1) * (SLICE_S + STEP_S + 2 * SWITCH_S)
    assert all(longest_wait(device, request) <= bound for request in requests)


def test_one_that_had_the_device_for_long_gives_way_at_once(serve: Callable[..., Service]) -> None:
    device, tickets = Device(), list[Ticket]()
    service = serve(device)
    device.on_event = lambda count: tickets.append(service.submit(steps(2))) if count == 20 else None
    finish(service.submit(steps(50)))
    assert device.order[:2] == [(50, 20), (2, 3)]


def test_a_turn_is_as_long_as_its_switches_are_cheap(serve: Callable[..., Service]) -> None:
    device = Device(switch_s=SLICE_S)
    for ticket in submit_all(device, serve(device), steps(200), steps(201)):
        finish(ticket)
    first, other, again = device.order[:3]
    assert first[1] == other[1] == SLICE_S / STEP_S and again[1] == SHARE * SLICE_S / STEP_S


def test_what_cannot_be_set_aside_is_asked_again_a_slice_later(serve: Callable[..., Service]) -> None:
    device = Device(refusals=2)
    for ticket in submit_all(device, serve(device), steps(50), steps(2)):
        finish(ticket)
    assert device.order[:2] == [(50, 3 * SLICE_S / STEP_S), (2, 3)]
    device = Device(refusals=1000)
    for ticket in submit_all(device, serve(device), steps(50), steps(2)):
        finish(ticket)
    assert device.order == [(50, 51), (2, 3)]


def test_status_and_positions_tell_who_waits_and_who_is_set_aside(serve: Callable[..., Service]) -> None:
    device, found, positions = Device(), list[Status](), list[list[int]]()
    service = serve(device)

    def look(count: int) -> None:
        if count in (1, 6):
            found.append(service.status)
            positions.append([ticket.position for ticket in service._turns.all])

    device.on_event = look
    tickets = submit_all(device, service, steps(10), steps(11), steps(12))
    told = [[event.position for event in finish(ticket)[0] if isinstance(event, Queued)] for ticket in tickets]
    counts = [(status.running, status.waiting, status.set_aside) for status in found]
    assert counts == [(1, 2, 0), (1, 1, 1)]
    assert positions == [[0, 1, 2], [0, 1, 2]] and all(each[-1] == 0 for each in told)
    assert (service.status.running, service.status.waiting, service.status.set_aside) == (0, 0, 0)


@pytest.mark.parametrize("chunks", [1, 60])
def test_one_that_is_cancelled_ends_at_once_wherever_it_is(serve: Callable[..., Service], chunks: int) -> None:
    device, ends = Device(), list[int]()
    service = serve(device)

    def cancel(count: int) -> None:
        if count == 6:  # of the second one: the first is set aside, and the last waits
            aside.cancel(), waits.cancel()
            assert waits.done
        elif count == 7:
            ends.append(aside.done)
            running.cancel()

    device.gate, device.on_event = threading.Event(), cancel
    aside, running, waits = (service.submit(steps(90 + number, chunks)) for number in range(3))
    device.gate.set()
    assert [finish(ticket)[1].reason for ticket in (aside, running, waits)] == ["cancelled"] * 3
    assert ends == [True] and len(device.log) == 7, "before the next event of the one that runs"


def test_one_that_breaks_the_engine_ends_those_that_are_set_aside(serve: Callable[..., Service]) -> None:
    device = Device(faults=[None, EngineError("dead")])
    first, second, third = submit_all(device, serve(device), steps(50), steps(1), steps(2))
    for ticket in (first, second, third):
        with pytest.raises(EngineError, match="dead"):
            list(ticket)


def reloading(*devices: Device) -> Service:
    given = list(devices)
    return Service(Model("one", lambda _progress: given.pop(0)), clock=devices[0].clock)


def test_a_lost_device_takes_replies_along_that_had_begun_and_no_others() -> None:
    lost, fresh = Device(faults=[None, None, DeviceLostError("gone")]), Device()
    with reloading(lost, fresh) as service:
        service.load()
        begun, reading, breaks, waits = submit_all(lost, service, steps(50), steps(50, 50), steps(1), steps(2))
        for ticket in (begun, breaks):
            with pytest.raises(DeviceLostError, match="gone"):
                list(ticket)
        for ticket in (reading, waits):
            assert finish(ticket)[1].reason == "stop"
    assert [each for each, _ in fresh.order] == [2, 50]


class Ordering(Device):
    """Orders its replies itself: all that are asked begin at once."""

    set_aside = None  # type: ignore[assignment]

    def _events(self, request: Request, cancelled: Callable[[], bool], fault: BaseException | None) -> Iterator[Event]:
        position = len(self.requests) - 1
        yield Queued(position)
        if fault is not None:
            assert self.gate is not None and self.gate.wait(60)
            raise fault
        while self.gate is not None and not self.gate.wait(0.002):
            if cancelled():
                yield Finished("cancelled", Usage(1, 0), STATS)
                return
        yield Started(1, 0, 0.0)
        yield Finished("stop", Usage(1, 0), STATS)


def test_a_backend_that_orders_requests_itself_is_handed_all(serve: Callable[..., Service]) -> None:
    device = Ordering(gate=threading.Event())
    assert device.gate is not None
    service = serve(device)
    tickets = [service.submit(steps(1)) for _ in range(4)]
    wait_until(lambda: (service.status.running, service.status.waiting) == (1, 3))
    tickets[2].cancel()
    assert finish(tickets[2])[1].reason == "cancelled", "as it says"
    wait_until(lambda: service.status.waiting == 2)
    device.gate.set()
    assert all(finish(tickets[number])[1].reason == "stop" for number in (0, 1, 3))
    device.gate.clear()
    ticket = service.submit(steps(1))
    service.close()
    assert finish(ticket)[1].reason == "cancelled" and device.closed


def test_what_all_lost_is_loaded_again_once() -> None:
    lost = Ordering(faults=[DeviceLostError("gone") for _ in range(3)], gate=threading.Event())
    assert lost.gate is not None
    with reloading(lost, Ordering()) as service:
        service.load()
        tickets = [service.submit(steps(1)) for _ in range(3)]
        wait_until(lambda: len(lost.requests) == 3)
        lost.gate.set()
        for ticket in tickets:
            events, finished = finish(ticket)
            assert finished.reason == "stop" and any(isinstance(event, Notice) for event in events)
