"""Replies on their way: framing, order, cancelling, many clients at once, faults in the middle."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflash_local.errors import DFlashError, EngineError, NumericsError, UsageError
from dflash_local.events import Event, Piece, Started, Step
from dflash_local.request import Request
from dflash_local.service.service import MAX_QUEUE
from tests.api.conftest import Answered, Running, Serve, body, wait_until
from tests.service.scripted import ScriptedSession

SLOW = tuple(Step((Piece(f"{n} "),), (n,), 3, 1, 4, 0.01) for n in range(50))
ODD = 'line\nreturn\r\r\nsep\u2028par\u2029nel\x85nul\x00"quote\\ é 🙂'


class Echo(ScriptedSession):
    """Answers with the last message, a word a step."""

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        words = request.messages[-1].content.split()
        self.steps = [Step((Piece(f"{word} "),), (1,), 3, 0, 4, 0.01) for word in words]
        yield from ScriptedSession.generate(self, request, cancelled)


class SlowPrefill(ScriptedSession):
    """Reads a prompt in as many chunks as it is let."""

    chunks = 0

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        for event in ScriptedSession.generate(self, request, cancelled):
            if isinstance(event, Started):
                while not cancelled():
                    self.chunks += 1
                    time.sleep(0.005)
            yield event


def opened(server: Running, **fields: Any) -> http.client.HTTPResponse:
    """A chat stream whose headers have come."""
    connection = server.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(body(**fields)), {"Content-Type": "application/json"})
    return connection.getresponse()


def idle(server: Running) -> bool:
    status = server.service.status
    return status.running == 0 and status.waiting == 0 and server.endpoint.live == 0


@pytest.mark.parametrize("accept", [None, "text/event-stream", "*/*", "application/json"])
def test_one_json_per_event_whatever_the_text(serve: Serve, accept: str | None) -> None:
    server = serve(ScriptedSession(steps=[Step((Piece(part),), (1,), 0, 0, 0, 0.1) for part in (ODD, ODD[::-1])]))
    answer = server.chat(stream=True, headers={"Accept": accept} if accept else None)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == ODD + ODD[::-1]
    lines = answer.body.decode("ascii").splitlines()  # splits at U+2028 and U+0085 too: there must be none
    assert [line for line in lines if line and not line.startswith("data: ")] == []
    assert answer.events[-1] == "[DONE]" and answer.events.count("[DONE]") == 1


def test_a_stream_and_a_whole_answer_say_the_same(server: Running) -> None:
    whole, stream = server.chat().json, server.chat(stream=True, stream_options={"include_usage": True})
    assert stream.text == whole["choices"][0]["message"]["content"] == "Hello, world!\n"
    chunks = stream.events[:-1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk"
    }


def test_figures_are_vllms_and_usage_is_openais(server: Running) -> None:
    answer = server.chat(seed=7).json
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    found = answer["metrics"]["speculative_decoding"]
    assert found["acceptance_histogram"] == [0, 1, 1, 0] and found["num_spec_steps"] == 2
    assert found["num_accepted_draft_tokens"] == 3 and found["num_draft_tokens"] == 6 and found["num_spec_tokens"] == 3
    assert found["mean_acceptance_length"] == 1 + 3 / 2 and found["draft_acceptance_rate"] == 0.5
    assert answer["metrics"]["dflash"]["seed"] == 7


def test_a_hundred_clients_are_served_or_told_to_wait(serve: Serve) -> None:
    gate = threading.Event()
    server = serve(Echo(gate=gate))

    def ask(number: int) -> tuple[int, Answered]:
        return number, server.chat(f"client {number} says {number}", stream=bool(number % 2))

    with ThreadPoolExecutor(100) as pool:
        asked = [pool.submit(ask, 0)]
        wait_until(lambda: server.service.status.running == 1)  # all others wait, or cannot
        asked += [pool.submit(ask, number) for number in range(1, 100)]
        wait_until(lambda: sum(one.done() for one in asked) == 100 - 1 - MAX_QUEUE)
        gate.set()
        answers = [one.result() for one in asked]
    refused = [answer for _, answer in answers if answer.status == 429]
    served = [(number, answer) for number, answer in answers if answer.status == 200]
    assert (len(served), len(refused)) == (1 + MAX_QUEUE, 100 - 1 - MAX_QUEUE)
    assert all(answer.headers["retry-after"] == "1" and answer.error["code"] == "queue_full" for answer in refused)
    for number, answer in served:
        text = answer.text if number % 2 else answer.json["choices"][0]["message"]["content"]
        assert text == f"client {number} says {number} ", "answers were mixed up"
    wait_until(lambda: idle(server))
    assert server.chat("still there").status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_within_a_cycle(serve: Serve, stream: bool) -> None:
    steps: list[int] = []
    gate = threading.Event()
    gate.set()

    def on_step(number: int) -> None:
        steps.append(number)
        if number == 3:
            gate.clear()  # from here on only a cancelled reply ends

    server = serve(ScriptedSession(steps=SLOW, on_step=on_step, gate=gate))
    sock = server.raw()
    data = json.dumps(body(stream=stream)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    wait_until(lambda: len(steps) > 3)
    sock.close()
    wait_until(lambda: idle(server))
    assert steps == [0, 1, 2, 3]
    assert server.get("/health").json["last_progress_s"] >= 0


def test_a_client_that_leaves_mid_prefill_cancels_it(serve: Serve) -> None:
    session = SlowPrefill()
    server = serve(session)
    response = opened(server, stream=True)
    wait_until(lambda: session.chunks > 2)
    response.close()
    wait_until(lambda: idle(server))  # nothing but a cancel ends this prefill
    assert len(session.requests) == 1


def test_a_client_that_leaves_the_queue_never_runs(serve: Serve) -> None:
    gate = threading.Event()
    session = ScriptedSession(gate=gate)
    server = serve(session)
    first = opened(server, stream=True)
    second = server.connect()
    second.request("POST", "/v1/chat/completions", json.dumps(body("no")), {"Content-Type": "application/json"})
    wait_until(lambda: server.service.status.waiting == 1)
    assert second.sock is not None
    second.sock.close()
    wait_until(lambda: server.service.status.waiting == 0)
    gate.set()
    assert b"[DONE]" in first.read()
    wait_until(lambda: idle(server))
    assert len(session.requests) == 1


def test_a_slow_reader_holds_up_nobody(serve: Serve) -> None:
    big = tuple(Step((Piece("x" * 20_000),), (n,), 0, 0, 0, 0.01) for n in range(300))
    server = serve(ScriptedSession(steps=big))
    response = opened(server, stream=True)  # and reads nothing of its 6 MB
    assert server.chat().status == 200
    wait_until(lambda: server.service.status.running == 0)
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in _data_lines(response.read())
    )
    assert text == "x" * 6_000_000


def _data_lines(raw: bytes) -> list[str]:
    return [line for line in raw.decode("ascii").split("\n") if line.startswith("data: {")]


def test_a_silent_engine_is_bridged_by_comments(serve: Serve) -> None:
    gate = threading.Event()
    server = serve(ScriptedSession(gate=gate), quiet_s=0.05)
    response = opened(server, stream=True)
    raw = b""
    while raw.count(b": waiting\n\n") < 2:
        raw += response.readline()
    gate.set()
    assert Answered(200, {}, raw + response.read()).text == "Hello, world!\n"


@pytest.mark.parametrize("fault", [EngineError("at once: dead"), RuntimeError("CUDA error: \r\n misaligned")], ids=str)
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_crash_is_told_and_health_is_503(serve: Serve, fault: Exception, stream: bool) -> None:
    server = serve(ScriptedSession(faults=[fault]), ScriptedSession())
    answer = server.chat(stream=stream)
    early = isinstance(fault, DFlashError) or not stream
    if early:
        assert answer.status == 500 and answer.error["type"] == "server_error"
    else:
        error = answer.events[-2]["error"]
        assert answer.status == 200 and error["code"] == "engine_error" and answer.events[-1] == "[DONE]"
    health = server.get("/health")
    assert health.status == 503 and health.json["state"] == "broken"
    assert server.get("/dflash/v1/status").json["error"]["exit_code"] == 7
    assert server.chat().status == 200, "the next request loads afresh"
    assert server.get("/health").status == 200


def test_waiting_streams_get_the_error_too(serve: Serve) -> None:
    gate = threading.Event()
    session = ScriptedSession(faults=[EngineError("dead")], gate=gate)
    server = serve(session)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.chat, "hi", stream=True)]
        wait_until(lambda: server.service.status.running == 1)
        answers += [pool.submit(server.chat, "hi", stream=True) for _ in range(2)]
        wait_until(lambda: server.service.status.waiting == 2)
        gate.set()
        got = [answer.result() for answer in answers]
    assert [answer.status for answer in got] == [200, 500, 500]
    assert all(b"engine_error" in answer.body for answer in got)


def test_a_fault_of_one_request_leaves_the_rest_well(serve: Serve) -> None:
    server = serve(ScriptedSession(faults=[NumericsError("NaN"), UsageError("at once: bad tool call")]))
    assert server.chat(stream=True).events[-2]["error"]["message"] == "NaN"
    refused = server.chat(stream=True)
    assert refused.status == 400 and refused.error["message"] == "at once: bad tool call"
    assert server.get("/health").json["state"] == "ready" and server.chat().status == 200


def test_an_unload_in_the_middle_is_an_error_event(serve: Serve) -> None:
    server = serve(ScriptedSession(gate=threading.Event()), ScriptedSession())
    response = opened(server, stream=True)
    assert server.call("POST", "/dflash/v1/unload", {}).json["state"] == "unloaded"
    assert b'"code":"cut_off"' in response.read()
    assert server.chat().status == 200
