"""One pair in memory: loaded once, let go when idle, loaded afresh after a fault, switched while running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflash_local.errors import (
    BusyError,
    CheckpointError,
    DeviceLostError,
    DoesNotFitError,
    EngineError,
    PromptError,
    UnknownModelError,
)
from dflash_local.events import Event, Finished, LoadProgress, Notice, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import Request
from dflash_local.service.backend import Model
from dflash_local.service.service import Service
from dflash_local.service.ticket import Ticket
from tests.service.scripted import PromptFault, ScriptedSession

REQUEST = Request(prompt_ids=(1, 2, 3))
Progress = Callable[[LoadProgress], None]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class Loader:
    """Loads scripted sessions and remembers them; a fault is raised instead, once."""

    def __init__(self, *sessions: ScriptedSession) -> None:
        self.given = list(sessions)
        self.loaded: list[ScriptedSession] = []
        self.faults: list[Exception | None] = []
        self.gate: threading.Event | None = None
        self.alive = 0

    def __call__(self, progress: Progress) -> ScriptedSession:
        progress(LoadProgress("weights", 0.5))
        assert all(session.closed for session in self.loaded), "two models in memory at once"
        if self.gate is not None:
            assert self.gate.wait(60)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        self.loaded.append(self.given.pop(0) if self.given else ScriptedSession())
        return self.loaded[-1]


Keep = Callable[..., Service]


@pytest.fixture
def keep() -> Iterator[Keep]:
    made: list[Service] = []

    def start(loader: Loader, keep_alive_s: float | None = None, **more: Any) -> Service:
        made.append(Service(Model("one", loader, aliases=("uno",)), keep_alive_s=keep_alive_s, **more))
        return made[-1]

    yield start
    for service in made:
        service.close()


def ids(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Step) for token in event.token_ids]


def finish(ticket: Ticket) -> Finished:
    last = list(ticket)[-1]
    assert isinstance(last, Finished)
    return last


def test_it_loads_with_the_first_request_and_stays(keep: Keep) -> None:
    loader = Loader()
    service = keep(loader)
    assert service.status.state == "unloaded" and service.facts is None
    assert finish(service.submit(REQUEST)).reason == "stop"
    assert finish(service.submit(REQUEST, "UNO")).reason == "stop"
    assert len(loader.loaded) == 1 and service.status.state == "ready"
    assert service.facts is not None and service.facts.context == 512


def test_ten_requests_that_come_while_it_loads_load_it_once(keep: Keep) -> None:
    loader = Loader()
    loader.gate = threading.Event()
    service = keep(loader)
    with ThreadPoolExecutor(10) as pool:
        tickets = [pool.submit(service.submit, REQUEST) for _ in range(8)]
        wait_until(lambda: service.status.waiting == 8)
        assert service.status.state == "loading"
        assert service.status.progress == LoadProgress("weights", 0.5)
        for _ in range(2):  # as many wait for the load as may wait in the queue
            with pytest.raises(BusyError):
                service.submit(REQUEST)
        loader.gate.set()
        assert [finish(ticket.result()).reason for ticket in tickets] == ["stop"] * 8
    assert len(loader.loaded) == 1 and service.status.waiting == 0


def test_it_is_not_idle_while_a_request_is_on_its_way_to_the_queue(keep: Keep) -> None:
    service = keep(Loader(), keep_alive_s=0.0)
    with service._loaded():
        assert service.status.state == "ready" and service._idle_left() is None


def test_it_is_not_idle_while_a_prompt_is_counted(keep: Keep) -> None:
    seen: list[float | None] = []

    class Counting(ScriptedSession):
        def count(self, request: Request) -> int:
            seen.append(service._idle_left())
            assert not self.closed
            return 7

    service = keep(Loader(Counting()), keep_alive_s=0.0)
    assert service.count(REQUEST) == 7 and seen == [None]
    wait_until(lambda: service.status.state == "unloaded")


def test_a_load_that_fails_is_told_to_all_who_waited_and_tried_again_later(keep: Keep) -> None:
    loader = Loader()
    loader.gate, loader.faults = threading.Event(), [CheckpointError("damaged")]
    service = keep(loader)
    with ThreadPoolExecutor(5) as pool:
        tickets = [pool.submit(service.submit, REQUEST) for _ in range(5)]
        wait_until(lambda: service.status.waiting == 5)
        loader.gate.set()
        errors = [ticket.exception() for ticket in tickets]
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert service.status.state == "broken" and isinstance(service.status.error, CheckpointError)
    assert finish(service.submit(REQUEST)).reason == "stop" and service.status.error is None


def test_an_unknown_fault_of_a_load_does_not_lock_others_out(keep: Keep) -> None:
    loader = Loader()
    loader.faults = [ZeroDivisionError("oh")]
    service = keep(loader)
    with pytest.raises(ZeroDivisionError):
        service.submit(REQUEST)
    assert service.status.state == "broken"
    assert finish(service.submit(REQUEST)).reason == "stop"


def test_it_is_unloaded_when_idle_and_comes_back(keep: Keep) -> None:
    loader = Loader()
    service = keep(loader, keep_alive_s=3600.0)
    finish(service.submit(REQUEST))
    assert service.status.state == "ready"
    service.keep_alive_s = 0.1
    wait_until(lambda: loader.loaded[0].closed)
    assert service.status.state == "unloaded"
    service.keep_alive_s = 3600.0
    finish(service.submit(REQUEST))
    assert len(loader.loaded) == 2 and not loader.loaded[1].closed


def test_keep_alive_counts_from_the_end_of_the_last_reply(keep: Keep) -> None:
    gate = threading.Event()
    loader = Loader(ScriptedSession(gate=gate))
    service = keep(loader, keep_alive_s=0.05)
    ticket = service.submit(REQUEST)
    time.sleep(0.3)
    assert service.status.state == "ready", "a running reply is no idleness"
    gate.set()
    assert finish(ticket).reason == "stop"
    wait_until(lambda: service.status.state == "unloaded")


def test_keep_alive_zero_unloads_at_once_and_none_never(keep: Keep) -> None:
    at_once, never = Loader(), Loader()
    first, second = keep(at_once, keep_alive_s=0), keep(never, keep_alive_s=None)
    for _ in range(5):
        assert finish(first.submit(REQUEST)).reason == "stop"
    finish(second.submit(REQUEST))
    wait_until(lambda: first.status.state == "unloaded" and all(session.closed for session in at_once.loaded))
    time.sleep(0.3)  # nothing is waited for: it is not to happen
    assert second.status.state == "ready"


def test_a_broken_engine_is_loaded_afresh_by_the_next_request(keep: Keep) -> None:
    loader = Loader(ScriptedSession(faults=[RuntimeError("CUDA error")]))
    service = keep(loader)
    with pytest.raises(EngineError, match="CUDA error"):
        list(service.submit(REQUEST))
    wait_until(lambda: service.status.running == 0)
    assert service.status.state == "broken"
    assert finish(service.submit(REQUEST)).reason == "stop"
    assert loader.loaded[0].closed and len(loader.loaded) == 2 and service.status.state == "ready"


def test_a_panic_is_told_by_the_status_and_the_next_request_loads_afresh(keep: Keep) -> None:
    class PanicException(BaseException):
        """As pyo3 raises for a panic of a Rust library."""

    loader = Loader(ScriptedSession(faults=[None, PromptFault(PanicException("prompt")), PanicException("reply")]))
    service = keep(loader)
    assert finish(service.submit(REQUEST)).reason == "stop"
    with pytest.raises(PromptError, match="PanicException: prompt"):
        list(service.submit(REQUEST))
    wait_until(lambda: service.status.running == 0)
    assert service.status.state == "ready"
    with pytest.raises(EngineError, match="PanicException: reply"):
        list(service.submit(REQUEST))
    wait_until(lambda: service.status.running == 0)
    status = service.status
    assert status.state == "broken" and status.error is not None and "PanicException: reply" in status.error.message
    assert finish(service.submit(REQUEST)).reason == "stop" and len(loader.loaded) == 2


def test_a_broken_engine_stays_broken_when_its_memory_is_given_back(keep: Keep) -> None:
    loader = Loader(ScriptedSession(faults=[EngineError("dead")]))
    service = keep(loader, keep_alive_s=0.05)
    with pytest.raises(EngineError):
        list(service.submit(REQUEST))
    wait_until(lambda: loader.loaded[0].closed)
    error = service.status.error
    assert service.status.state == "broken" and error is not None and error.message == "dead"


def test_unload_cancels_what_runs(keep: Keep) -> None:
    loader = Loader(ScriptedSession(gate=threading.Event()))
    service = keep(loader)
    running, waiting = service.submit(REQUEST), service.submit(REQUEST)
    service.unload()
    assert finish(running).reason == finish(waiting).reason == "cancelled"
    assert service.status.state == "unloaded" and loader.loaded[0].closed
    service.unload()
    assert finish(service.submit(REQUEST)).reason == "stop"


def test_switch_loads_another_model_and_gives_the_first_ones_memory_back(keep: Keep) -> None:
    one, two = Loader(ScriptedSession(gate=threading.Event())), Loader()
    models = {"two": Model("two", two)}

    def find(name: str, _load: LoadConfig | None) -> Model:
        if name not in models:
            raise UnknownModelError(f"unknown model {name!r}")
        return models[name]

    service = keep(one, find=find)
    running = service.submit(REQUEST)
    service.switch("two")
    assert finish(running).reason == "cancelled" and one.loaded[0].closed
    assert service.model.name == service.status.model == "two"
    with pytest.raises(UnknownModelError, match="no longer served"):
        service.submit(REQUEST, "one")
    with pytest.raises(UnknownModelError):
        service.switch("three")
    assert finish(service.submit(REQUEST, "two")).reason == "stop"
    service.switch("two")
    assert len(two.loaded) == 1


def test_a_switch_that_fails_keeps_the_first_model(keep: Keep) -> None:
    one, two = Loader(), Loader()
    two.faults = [CheckpointError("damaged")]
    service = keep(one, find=lambda _name, _load: Model("two", two))
    finish(service.submit(REQUEST))
    with pytest.raises(CheckpointError):
        service.switch("two")
    assert service.model.name == "one"
    assert finish(service.submit(REQUEST, "one")).reason == "stop" and len(one.loaded) == 2


def test_the_observer_sees_every_step_and_the_clock_its_progress(keep: Keep) -> None:
    seen: list[Event] = []
    service = keep(Loader(), observe=lambda _request, event: seen.append(event))
    assert service.status.last_progress_s is None
    finish(service.submit(REQUEST))
    assert sum(isinstance(event, Step) for event in seen) == 3 and isinstance(seen[-1], Finished)
    since = service.status.last_progress_s
    assert since is not None and since < 5


def test_closed_is_closed(keep: Keep) -> None:
    loader = Loader(ScriptedSession(gate=threading.Event()))
    service = keep(loader, keep_alive_s=60.0)
    running = service.submit(REQUEST)
    service.close()
    assert finish(running).reason == "cancelled" and loader.loaded[0].closed
    for call in (service.load, service.unload, lambda: service.submit(REQUEST)):
        with pytest.raises(EngineError):
            call()
    service.close()


def test_many_threads_submit_while_it_is_unloaded_again_and_again(keep: Keep) -> None:
    loader = Loader()
    service = keep(loader, keep_alive_s=0)

    def ask(_number: int) -> str:
        return finish(service.submit(REQUEST)).reason

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(ask, range(60))) == {"stop"}
    assert all(session.threads and len(session.threads) == 1 for session in loader.loaded)


AT_ONCE = "at once: CUDA error: unknown error"


def notices(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


def test_a_context_lost_before_the_reply_is_answered_by_the_pair_loaded_again(keep: Keep) -> None:
    first, second = ScriptedSession(faults=[DeviceLostError(AT_ONCE)]), ScriptedSession()
    service = keep(Loader(first, second))
    events = list(service.submit(REQUEST))
    assert notices(events) == [f"{AT_ONCE}; the pair is loaded again"]
    assert ids(events) == [10, 11, 12, 13, 14, 15]
    assert first.closed and len(second.requests) == 1 and service.fault is None
    assert notices(list(service.submit(REQUEST))) == []


def test_a_context_lost_in_the_reply_ends_it_and_the_next_request_is_answered(keep: Keep) -> None:
    loader = Loader(ScriptedSession(faults=[DeviceLostError("CUDA error")]))
    service = keep(loader)
    ticket = service.submit(REQUEST)
    with pytest.raises(DeviceLostError, match="the pair was loaded again") as caught:
        list(ticket)
    assert caught.value.hint == "send it again" and service.fault is None
    assert finish(service.submit(REQUEST)).reason == "stop" and len(loader.loaded) == 2


def test_a_context_lost_twice_without_a_reply_between_breaks_the_session(keep: Keep) -> None:
    loader = Loader(*(ScriptedSession(faults=[DeviceLostError(AT_ONCE)]) for _ in range(2)))
    service = keep(loader)
    with pytest.raises(DeviceLostError, match="unknown error"):
        list(service.submit(REQUEST))
    assert len(loader.loaded) == 2 and service.fault is not None


@pytest.mark.parametrize(
    "fault", [DoesNotFitError("no memory", "wait"), RuntimeError("CUDA error: unknown error"), MemoryError("none")]
)
def test_a_pair_that_cannot_be_loaded_again_breaks_the_session_in_one_line(keep: Keep, fault: Exception) -> None:
    loader = Loader(ScriptedSession(faults=[DeviceLostError(AT_ONCE)]))
    loader.faults = [None, fault]
    service = keep(loader)
    with pytest.raises(EngineError, match="it cannot be loaded again") as caught:
        list(service.submit(REQUEST))
    assert caught.value.hint and service.fault is not None and service._worker.is_alive()
