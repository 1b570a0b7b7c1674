"""What a body may hold at most, and that reading a large one leaves the server's loop free."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflash_local.api import chat_completions, request_body
from dflash_local.api.refusals import FieldError
from dflash_local.api.request_body import parse
from dflash_local.errors import ContextError, UsageError
from dflash_local.request import Message, Request, ToolCall, read_arguments
from tests.api.bodies import MODEL, chat, refusal
from tests.api.conftest import Running, body


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize("depth", [65, 490, 985, 100_000])
def test_arguments_nested_too_deep_are_refused_by_name(depth: int) -> None:
    function = {"name": "add", "arguments": nested(depth)}
    call = {"id": "c1", "type": "function", "function": function}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert refusal(chat, messages=said)["param"] == "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(UsageError, match="64 deep"):
        read_arguments(ToolCall("c1", "add", nested(depth)))


@pytest.mark.parametrize("depth", [65, 490, 700])
def test_a_schema_nested_too_deep_is_refused_by_name(depth: int) -> None:
    tool = f'{{"type": "function", "function": {{"name": "add", "parameters": {nested(depth)}}}}}'
    sent = '{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [' + tool + "]}"
    with pytest.raises(FieldError, match="64 deep") as caught:
        chat_completions.read(sent.encode(), lambda _name: MODEL)
    assert caught.value.param == "tools[0].function.parameters"


def test_what_is_nested_as_deep_as_allowed_is_taken() -> None:
    assert read_arguments(ToolCall("c1", "add", nested(64))) == json.loads(nested(64))
    tool = {"type": "function", "function": {"name": "add", "parameters": json.loads(nested(62))}}
    assert chat(tools=[tool]).request.tools == (tool,)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LARGE = "x" * 2**21


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 10_001}]}, "messages[0].tool_calls"),
        ({"tools": [{}] * 513}, "tools"),
        ({"stop": ["x"] * 129}, "stop"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(nested(65))}}},
         "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1] * 2**22}}}]},
         "tools[0].function.parameters"),
    ],
    ids=["parts", "calls", "tools", "stop", "format", "schema"],
)  # fmt: skip
def test_what_is_too_large_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields)["param"] == param


@pytest.mark.parametrize(
    "more",
    [
        {"content": LARGE},
        {"thinking": LARGE},
        {"name": LARGE},
        {"tool_call_id": LARGE},
        {"tool_calls": (ToolCall("c", "f", LARGE),)},
        {"tool_calls": (ToolCall(LARGE, "f", "{}"),)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_all_texts_of_all_messages_count_together(more: dict[str, Any]) -> None:
    half: Any = Message("user", "x" * (2**21 - 9))
    rest: Any = Message("assistant", **{"content": "", **more})
    tool = {"function": {"description": "x" * (4 * 2**20 - half.size - rest.size - 24)}}
    Request(messages=(half, rest))
    for too_much in ({"messages": (half, rest, half)}, {"messages": (half, rest), "tools": (tool,)}):
        with pytest.raises(ContextError, match="4194304 allowed"):
            Request(**too_much)


def test_too_many_messages_are_refused() -> None:
    refused = refusal(chat, messages=[{"role": "user", "content": "x"}] * 20_000)
    assert refused["param"] == "messages" and "must be a list of 1 to 10,000" in refused["message"]
    with pytest.raises(UsageError, match="10000 allowed"):
        Request(messages=(Message("user", "x"),) * 10_001)


def test_a_body_of_very_many_brackets_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **_named: pytest.fail("it was read"))
    with pytest.raises(FieldError, match="more than 200,000 opening brackets"):
        parse(b"[{" * 100_001)


READERS = [("/v1/chat/completions", body()), ("/v1/completions", {"model": "scripted", "prompt": "hi"})]


@pytest.mark.parametrize(("path", "sent"), READERS, ids=["chat", "completion"])
def test_health_answers_while_a_body_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, sent: dict[str, Any]
) -> None:
    reading, go_on, read = threading.Event(), threading.Event(), request_body.parse

    def slow(*arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(30)
        return read(*arguments)

    monkeypatch.setattr(request_body, "parse", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.call, "POST", path, sent)
        try:
            assert reading.wait(30)
            assert server.get("/health").status == 200 and not answer.done()
        finally:
            go_on.set()
        assert answer.result().status == 200
