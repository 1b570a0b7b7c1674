"""One session, one worker: order, bounds, cancelling, faults, and who hears what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_local.errors import (
    BusyError,
    DeviceLostError,
    DFlashError,
    DoesNotFitError,
    EngineError,
    NumericsError,
    PromptError,
    UsageError,
)
from dflash_local.events import Event, Finished, Piece, Queued, Started, Step
from dflash_local.request import Request
from dflash_local.service.service import Service
from dflash_local.service.ticket import Ticket
from tests.service.scripted import HELLO, PromptFault, ScriptedSession

REQUEST = Request(prompt_ids=(1, 2, 3))


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(session: ScriptedSession, **more: Any) -> Service:
        services.append(Service.over(session, **more))
        return services[-1]

    yield start
    for service in services:
        service.close()


def ids(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Step) for token in event.token_ids]


def finish(ticket: Ticket) -> tuple[list[Event], Finished]:
    events = list(ticket)
    assert isinstance(events[-1], Finished)
    return events, events[-1]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def test_a_request_gives_its_events_in_order_and_one_end(serve: Callable[..., Service]) -> None:
    session = ScriptedSession()
    events, finished = finish(serve(session).submit(REQUEST))
    assert isinstance(events[0], Queued) and events[0].position == 0
    assert any(isinstance(event, Started) for event in events)
    assert ids(events) == [10, 11, 12, 13, 14, 15]
    assert finished.reason == "stop" and finished.usage.completion_tokens == 6


def test_the_worker_alone_touches_the_session(serve: Callable[..., Service]) -> None:
    session = ScriptedSession()
    service = serve(session)
    for _ in range(3):
        finish(service.submit(REQUEST))
    assert len(session.threads) == 1 and threading.get_ident() not in session.threads
    service.close()
    assert session.closed


def test_a_full_queue_is_refused_by_name_and_positions_count_down(serve: Callable[..., Service]) -> None:
    gate = threading.Event()
    session = ScriptedSession(gate=gate)
    service = serve(session, max_queue=2)
    running = service.submit(REQUEST)
    wait_until(lambda: bool(session.requests))
    second, third = service.submit(REQUEST), service.submit(REQUEST)
    assert next(iter(third)) == Queued(2)
    with pytest.raises(BusyError) as refused:
        service.submit(REQUEST)
    assert refused.value.http_status == 429
    gate.set()
    for ticket in (running, second):
        finish(ticket)
    positions = [event.position for event in finish(third)[0] if isinstance(event, Queued)]
    assert positions == sorted(positions, reverse=True) and set(positions) <= {0, 1}
    finish(service.submit(REQUEST))


def test_cancel_while_running_ends_within_one_cycle_and_stays_healthy(serve: Callable[..., Service]) -> None:
    holder: list[Ticket] = []
    session = ScriptedSession(on_step=lambda index: holder[0].cancel() if index == 1 else None)
    gate = session.gate = threading.Event()
    service = serve(session)
    holder.append(service.submit(REQUEST))
    gate.set()
    events, finished = finish(holder[0])
    assert finished.reason == "cancelled" and ids(events) == [10]
    session.on_step = None
    assert finish(service.submit(REQUEST))[1].reason == "stop"


def test_cancel_while_queued_ends_at_once_and_frees_the_place(serve: Callable[..., Service]) -> None:
    gate = threading.Event()
    session = ScriptedSession(gate=gate)
    service = serve(session, max_queue=2)
    running = service.submit(REQUEST)
    wait_until(lambda: bool(session.requests))
    waiting, behind = service.submit(REQUEST), service.submit(REQUEST)
    waiting.cancel()
    _, finished = finish(waiting)  # although the first one still runs
    assert finished.reason == "cancelled" and finished.usage.completion_tokens == 0
    assert list(behind._waiting) == [Queued(1)], "it is told that it moved up"
    another = service.submit(REQUEST)
    gate.set()
    assert all(finish(ticket)[1].reason == "stop" for ticket in (running, behind, another))
    assert len(session.requests) == 3, "the cancelled request never reached the engine"


def test_cancel_after_the_end_changes_nothing(serve: Callable[..., Service]) -> None:
    service = serve(ScriptedSession())
    ticket = service.submit(REQUEST)
    _, finished = finish(ticket)
    ticket.cancel()
    assert finished.reason == "stop" and ticket.done
    assert finish(service.submit(REQUEST))[1].reason == "stop"


def test_a_listener_that_never_reads_does_not_block_the_worker(serve: Callable[..., Service]) -> None:
    steps = [Step((Piece("x"),), (index,), 1, 1, 2, 0.0) for index in range(20_000)]
    service = serve(ScriptedSession(steps=steps))
    ticket = service.submit(REQUEST)
    wait_until(lambda: ticket.done)
    events = list(ticket)
    assert len(events) < 200 and ids(events) == list(range(20_000))


@pytest.mark.parametrize("fault", [UsageError("too long"), DoesNotFitError("no memory"), NumericsError("NaN")])
def test_a_failed_request_leaves_the_session_healthy(serve: Callable[..., Service], fault: Exception) -> None:
    service = serve(ScriptedSession(faults=[fault]))
    ticket = service.submit(REQUEST)
    with pytest.raises(type(fault)):
        list(ticket)
    assert service.fault is None
    assert finish(service.submit(REQUEST))[1].reason == "stop"


def test_an_engine_error_breaks_the_session_for_the_queue_and_later_requests(
    serve: Callable[..., Service],
) -> None:
    gate = threading.Event()
    session = ScriptedSession(faults=[EngineError("dead context")], gate=gate)
    service = serve(session)
    first, queued = service.submit(REQUEST), service.submit(REQUEST)
    gate.set()
    with pytest.raises(EngineError, match="dead context"):
        list(first)
    with pytest.raises(EngineError, match="broken: dead context"):
        list(queued)
    with pytest.raises(EngineError) as later:
        service.submit(REQUEST)
    assert later.value.exit_code == 7 and service.fault is not None
    assert len(session.requests) == 1 and not service._turns.waiting, "nothing more is asked of what is broken"


def test_without_a_way_to_load_again_a_lost_context_breaks_the_session(serve: Callable[..., Service]) -> None:
    service = serve(ScriptedSession(faults=[DeviceLostError("CUDA error")]))
    with pytest.raises(DeviceLostError):
        list(service.submit(REQUEST))
    assert service.fault is not None


def test_an_unknown_fault_becomes_one_typed_error_with_its_cause(serve: Callable[..., Service]) -> None:
    service = serve(ScriptedSession(faults=[ZeroDivisionError("oops")]))
    with pytest.raises(EngineError, match="ZeroDivisionError: oops") as raised:
        list(service.submit(REQUEST))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


class PanicException(BaseException):
    """As pyo3 raises for a panic of a Rust library."""


@pytest.mark.parametrize("fault", [PanicException("index out of bounds"), SystemExit(1), GeneratorExit()])
def test_what_is_no_exception_ends_its_request_and_not_the_worker(
    serve: Callable[..., Service], fault: BaseException
) -> None:
    gate = threading.Event()
    service = serve(ScriptedSession(faults=[fault], gate=gate))
    running, waiting = service.submit(REQUEST), service.submit(REQUEST)
    gate.set()
    with pytest.raises(EngineError, match=f"the engine failed: {type(fault).__name__}"):
        list(running)
    with pytest.raises(EngineError, match="broken"):
        list(waiting)
    assert service.fault is not None and service.fault is not None and service._worker.is_alive()


@pytest.mark.parametrize(
    "fault", [RecursionError("too deep"), PanicException("boom"), MemoryError(), EngineError("of the prompt")]
)
def test_a_fault_while_the_prompt_is_prepared_is_never_the_engines(
    serve: Callable[..., Service], fault: BaseException
) -> None:
    gate = threading.Event()
    service = serve(ScriptedSession(faults=[None, PromptFault(fault)], gate=gate))
    first, second, neighbour = (service.submit(REQUEST) for _ in range(3))
    gate.set()
    assert finish(first)[1].reason == "stop"
    with pytest.raises(DFlashError, match="the prompt") as raised:
        list(second)
    assert isinstance(raised.value, PromptError) or raised.value is fault
    assert finish(neighbour)[1].reason == "stop" and service.fault is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_leaves_nobody_waiting(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = threading.Event()

    def die(*_: object) -> None:
        queued.wait(60)
        raise SystemExit

    monkeypatch.setattr(Service, "_serve", die)
    service = serve(ScriptedSession())
    tickets = [service.submit(REQUEST), service.submit(REQUEST)]
    queued.set()
    for ticket in tickets:
        with pytest.raises(EngineError, match="died"):
            list(ticket)
    assert service.fault is not None
    with pytest.raises(EngineError, match="closed"):
        service.submit(REQUEST)


def test_an_engine_that_ends_without_a_word_is_an_error(serve: Callable[..., Service]) -> None:
    class Mute(ScriptedSession):
        def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
            yield HELLO[0]

    with pytest.raises(EngineError, match="without saying why"):
        list(serve(Mute()).submit(REQUEST))


def test_close_cancels_what_runs_and_what_waits_and_refuses_the_rest(serve: Callable[..., Service]) -> None:
    session = ScriptedSession(gate=threading.Event())  # would never end by itself
    service = serve(session)
    running, waiting = service.submit(REQUEST), service.submit(REQUEST)
    service.close()
    service.close()
    assert finish(running)[1].reason == "cancelled" and finish(waiting)[1].reason == "cancelled"
    assert session.closed
    with pytest.raises(EngineError, match="closed"):
        service.submit(REQUEST)


def test_reading_goes_on_where_it_was_interrupted(serve: Callable[..., Service]) -> None:
    ticket = serve(ScriptedSession()).submit(REQUEST)
    events = []
    for event in ticket:
        events.append(event)
        if isinstance(event, Started):
            break
    events.extend(ticket)
    assert ids(events) == [10, 11, 12, 13, 14, 15] and isinstance(events[-1], Finished)
