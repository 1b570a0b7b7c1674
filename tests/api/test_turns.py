"""Several clients at once: each gets what it gets alone, and one that leaves frees its turn."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dflash_local.events import Event
from dflash_local.load_config import LoadConfig
from dflash_local.service import turns
from tests.api.conftest import Answered, Serve, body, wait_until
from tests.api.test_streams import idle
from tests.service.test_turns import Device


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event is the end of a turn where another request waits."""
    monkeypatch.setattr(turns, "SLICE_S", 0.0)
    monkeypatch.setattr(turns, "SHARE", 0)


def said(answer: Answered) -> str:
    return answer.text or answer.json["choices"][0]["message"]["content"]


@pytest.mark.needs_torch
def test_four_clients_at_once_get_what_each_gets_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_local.catalog import bundled
    from dflash_local.engine import load

    session = load(bundled.find("demo"), LoadConfig(engine="fused", device="cpu", dtype="float32"))
    server, switches = serve(session), list[bool]()
    asks = [
        partial(server.chat, "Count from 3 to 27.", temperature=0),
        partial(server.chat, "Spell the word tree.", temperature=0.9, seed=3, stream=True),
        partial(server.chat, "Count from 10 to 40.", temperature=0, stop=["29"]),
        partial(server.chat, "What is 2 + 3?", temperature=0, response_format={"type": "json_object"}, max_tokens=20),
    ]
    alone = [said(ask()) for ask in asks]
    set_aside, generate = session.set_aside, session.generate

    def counted() -> bool:
        switches.append(set_aside())
        return switches[-1]

    def together(*arguments: object) -> Iterator[Event]:
        """The first one begins when the others wait."""
        monkeypatch.setattr(session, "generate", generate)
        wait_until(lambda: server.service.status.waiting == len(asks) - 1)
        return generate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "set_aside", counted)
    monkeypatch.setattr(session, "generate", together)
    with ThreadPoolExecutor(len(asks)) as pool:
        assert [said(answer) for answer in pool.map(lambda ask: ask(), asks)] == alone
    assert sum(switches) > 12 and all(alone)


def test_a_client_that_leaves_while_it_is_set_aside_frees_its_turn(serve: Serve) -> None:
    device, left = Device(gate=threading.Event()), threading.Event()
    server = serve(device)
    first = server.connect()
    first.request("POST", "/v1/chat/completions", json.dumps(body("first")), {"Content-Type": "application/json"})
    wait_until(lambda: server.service.status.running == 1)

    def on_event(count: int) -> None:
        if count == 4:  # the other's second one
            shown.append(server.get("/dflash/v1/status").json["set_aside"])
            left.set()
            wait_until(lambda: any(ticket.cancelled for ticket in server.service._turns.set_aside))

    shown = list[int]()
    device.on_event = on_event
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, "other", max_tokens=5)
        wait_until(lambda: server.service.status.waiting == 1)
        device.gate.set()  # type: ignore[union-attr]
        assert left.wait(60)
        assert first.sock is not None
        first.sock.close()
        assert other.result().status == 200
    wait_until(lambda: idle(server))
    asked = [request.messages[-1].content for request, _ in device.log]
    assert shown == [1] and (asked.count("first"), asked.count("other")) == (2, 6)
