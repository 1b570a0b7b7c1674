"""Anthropic's dialect: bodies as Claude Code sends them, events in their order, and its own client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from dflash_local.api import messages
from dflash_local.catalog.bundled import find as find_pair
from dflash_local.errors import ContextError, UsageError
from dflash_local.events import Finished, FinishReason, Piece, Step
from dflash_local.request import Limits, Message, Request, ToolCall
from dflash_local.service.backend import Backend as Session
from dflash_local.service.backend import Model
from tests.api.bodies import find, refusal
from tests.api.conforming import conforms
from tests.api.conftest import TOOL, Running, Serve, wait_until
from tests.service.scripted import PromptFault, ScriptedSession

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
ADD = {"name": "add", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
QUESTION = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 100, "messages": QUESTION, **fields}


def read(**fields: Any) -> messages.ParsedRequest:
    return messages.read(json.dumps(body(**fields)).encode(), find)


@pytest.fixture
def anthropic() -> Any:
    """The library, which is not installed for the other Pythons that are tested."""
    return pytest.importorskip("anthropic")


@pytest.fixture
def client(anthropic: Any) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def connect(server: Running, **more: Any) -> Any:
        address = f"http://127.0.0.1:{server.port}"
        made.append(anthropic.Anthropic(base_url=address, max_retries=0, timeout=60, **{"api_key": "none", **more}))
        return made[-1]

    yield connect
    for one in made:
        one.close()


@conforms(
    "llama.cpp",
    "messages_with_system messages_multipart_content messages_conversation tool_result_error thinking metadata",
)
@conforms("vllm anthropic", "system_message billing_header_stripped_from_system redacted_thinking_valid_passes "
          "thinking_plus_text_in_assistant_message thinking_plus_tool_use_in_assistant_message "
          "redacted_thinking_block_is_accepted spec_compliant_top_level_system_untouched")  # fmt: skip
def test_a_conversation_as_claude_code_sends_it() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=5f3a;"
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    shown = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}], **cached}
    parsed = read(
        system=[{"type": "text", "text": billing}, {"type": "text", "text": f"{billing}\nBe brief.", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "so", "signature": "of another server"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [shown, {"type": "text", "text": "go on"}]},
            {"role": "system", "content": f"{billing}\nThe date changed."},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True}]},
        ],
        tools=[{**ADD, "description": "adds", "defer_loading": True}, {"type": "web_search_20250305", "name": "web"}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive", "budget_tokens": 10_000},
        stop_sequences=["</block>"],
        metadata={"user_id": "me"},
        context_management={"edits": [{"type": "clear_thinking"}]},
        output_config={"effort": "high"},
        stream=True,
    )  # fmt: skip
    assert parsed.request.messages == (
        Message("system", "Be brief."),
        Message("user", "one\n\ntwo"),
        Message("assistant", "I add.", "so", (ToolCall("toolu_1", "add", '{"a": 1}'),)),
        Message("tool", "3", tool_call_id="toolu_1"),
        Message("user", "go on"),
        Message("user", "The date changed."),
        Message("tool", "", tool_call_id="toolu_2"),
    )
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    offered = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": schema}}
    assert parsed.request.tools == (offered,) and parsed.request.thinking and parsed.stream
    assert parsed.request.limits == Limits(100, ("</block>",))
    named = " ".join(parsed.taken)
    fields = (
        "system[].cache_control",
        "messages[].content[].caller",
        "tools[].defer_loading",
        "thinking.budget_tokens",
    )
    for field in fields:
        assert f"{field}: " in named
    assert "web is not the client's own" in named and parsed.request.reasoning_effort == "high"
    assert read(tools=[ADD], tool_choice={"type": "none"}).request.tools == () and not read().request.thinking


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
        ]}]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "{"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop": ["x"]}, "stop"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"temperature": "hot"}, "temperature"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(read, **fields)
    assert error["param"] == param, error


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_conversation_that_the_server_is_to_keep_is_refused_so_that_the_client_sends_it(
    server: Running, thread: dict[str, str]
) -> None:
    """As the tool runner of anthropic 2.14.0 asks for one: the refusal's details tell it to send all from then on."""
    answer = server.call("POST", PATH, body(thread=thread))
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert answer.error["details"]["error_code"] == "thread_unsupported_request"
    assert answer.error["details"]["unsupported"] == ["thread"] and "details" not in server.call("POST", PATH, {}).error


@conforms(
    "llama.cpp",
    "messages_streaming tool_use_basic tool_streaming streaming_content_block_indices thinking_with_reasoning_model",
)
@conforms("vllm anthropic", "reasoning_then_tool_transitions_cleanly anthropic_tool_call_streaming")  # fmt: skip
def test_the_events_of_a_stream(serve: Serve) -> None:
    """Thinking, text and a call, each in a block of its own and cut anywhere."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    thoughts = [Piece(text, "thinking") for text in ("I thi", "nk")]
    pieces = [*thoughts, *map(Piece, ("Ad", f"ding.{call[:9]}", call[9:]))]
    steps = [Step((piece,), (1,), 0, 0, 0, 0.1) for piece in pieces]
    server = serve(ScriptedSession(steps=steps))
    answer = server.call("POST", PATH, body(tools=[ADD], stream=True))
    frames = [frame.split("\n") for frame in answer.body.decode().split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [event["type"] for event in events]
    start, *middle, last, stop = events
    assert start["message"] | {"id": ""} == {
        "id": "", "type": "message", "role": "assistant", "model": "scripted", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": start["message"]["usage"],
    }  # fmt: skip
    blocks: list[Any] = []
    for event in middle:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"], []])
        elif event["type"] == "content_block_delta":
            blocks[-1][1].append(event["delta"])
        assert event["index"] == len(blocks) - 1
    assert [event["type"] for event in middle].count("content_block_stop") == len(blocks) == 3
    thought, said, called = blocks
    assert thought[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [delta["type"] for delta in thought[1]] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert said[0]["type"] == "text" and "".join(delta["text"] for delta in said[1]) == "Adding."
    assert called[0] == {"type": "tool_use", "id": called[0]["id"], "name": "add", "input": {}}
    assert json.loads("".join(delta["partial_json"] for delta in called[1])) == {"a": 1}
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and stop == {"type": "message_stop"}
    whole = server.call("POST", PATH, body(tools=[ADD])).json
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"a": 1} and whole["stop_reason"] == "tool_use"
    assert whole["usage"] == last["usage"]


@conforms(
    "vllm anthropic", "non_streaming_stop_string_maps_to_stop_sequence streaming_stop_string_maps_to_stop_sequence"
)
@pytest.mark.parametrize(
    ("end", "stop", "told"),
    [
        ("stop", "", ("end_turn", None)),
        ("length", "", ("max_tokens", None)),
        ("stop", "</a>", ("stop_sequence", "</a>")),
    ],
)
def test_why_a_message_ends(serve: Serve, end: FinishReason, stop: str, told: tuple[str, str | None]) -> None:
    class Ended(ScriptedSession):
        def _finished(self, *arguments: Any) -> Finished:
            return replace(super()._finished(*arguments), stop=stop)

    server = serve(Ended(end=end))
    whole = server.call("POST", PATH, body()).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == told
    streamed = server.call("POST", PATH, body(stream=True)).body.decode()
    (last,) = (
        json.loads(line[6:]) for line in streamed.split("\n") if line.startswith('data: {"type":"message_delta"')
    )
    assert last["delta"] == {"stop_reason": told[0], "stop_sequence": told[1]}


def test_errors_are_anthropics(anthropic: Any, client: Callable[..., Any], server: Running, guarded: Running) -> None:
    api = client(server)
    with pytest.raises(anthropic.NotFoundError, match="scripted"):
        api.messages.create(**body(model="claude-opus"))
    with pytest.raises(anthropic.BadRequestError) as caught:
        api.messages.create(**body(), extra_body={"temperature": 100})
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        client(guarded, api_key="wrong").messages.create(**body())
    token = "correct-horse-battery"
    for given in ({"api_key": token}, {"api_key": None, "auth_token": token}):
        assert client(guarded, **given).messages.create(**body()).stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("method", "path", "headers", "sent", "status", "kind"),
    [
        ("POST", PATH, {"x-api-key": "wrong"}, b"{}", 401, "authentication_error"),
        ("POST", COUNT, {"Origin": "https://evil.example"}, b"{}", 403, "permission_error"),
        ("GET", PATH, {}, None, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", {}, b"{}", 404, "not_found_error"),
        ("POST", PATH, {}, b"x" * (8 * 2**20 + 1), 413, "request_too_large"),
        ("POST", PATH, {"Content-Type": "text/plain"}, b"{}", 415, "invalid_request_error"),
        ("GET", "/v1/models/opus", {"anthropic-version": "2023-06-01"}, None, 404, "not_found_error"),
    ],
)
def test_whoever_refuses_a_request_says_so_in_anthropics_shape(
    guarded: Running, method: str, path: str, headers: dict[str, str], sent: bytes | None, status: int, kind: str
) -> None:
    answer = guarded.call(method, path, sent, {"x-api-key": "correct-horse-battery", **headers})
    assert answer.status == status and set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error" and answer.error["type"] == kind and answer.error["message"]


def test_a_prompt_that_is_too_long_is_said_in_anthropics_words(serve: Serve) -> None:
    for stream in (False, True):
        server = serve(ScriptedSession(faults=[PromptFault(ContextError("9 tokens, 8 allowed"))]))
        answer = server.call("POST", PATH, body(stream=stream))
        assert answer.status == 400 and answer.error["message"].startswith("prompt is too long: 9 tokens")


def test_the_anthropic_client_reads_everything(client: Callable[..., Any], serve: Serve, server: Running) -> None:
    api = client(server)
    whole = api.messages.create(**body(system="Be brief."))
    assert whole.content[0].text == "Hello, world!\n" and whole.usage.output_tokens == 6
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    with api.messages.stream(**body()) as stream:
        assert "".join(stream.text_stream) == "Hello, world!\n"
        last = stream.get_final_message()
    assert (last.usage.input_tokens, last.usage.output_tokens) == (5, 6)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    called = client(serve(ScriptedSession(steps=[Step((Piece(call),), (1,), 0, 0, 0, 0.1)])))
    with called.messages.stream(**body(tools=[ADD])) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use" and block.input == {"a": 1}


@conforms("llama.cpp", "count_tokens count_tokens_no_max_tokens")
def test_a_prompt_is_counted_beside_a_running_reply(serve: Serve) -> None:
    gate = threading.Event()
    server = serve(ScriptedSession(gate=gate))
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.call, "POST", PATH, body())
        wait_until(lambda: server.service.status.running == 1)
        counted = server.call("POST", COUNT, {"model": "toy", "messages": QUESTION}).json
        assert server.service.status.running == 1
        gate.set()
        assert counted == {"input_tokens": 5} and reply.result().json["usage"]["input_tokens"] == 5


def test_what_cannot_be_counted_is_said_in_anthropics_words(serve: Serve) -> None:
    class Mute(ScriptedSession):
        def count(self, request: Request) -> int:
            raise UsageError("tokens cannot be counted")

    server = serve(Mute())
    for sent in (body(), body(model="claude-opus"), body(messages=[])):
        answer = server.call("POST", COUNT, sent)
        assert answer.status in (400, 404) and answer.json["type"] == "error" and answer.error["message"]


@conforms("llama.cpp", "count_tokens_with_system")
@pytest.mark.needs_torch
def test_the_demo_pair_end_to_end(client: Callable[..., Any], serve: Serve) -> None:
    def load(_progress: object) -> Session:
        from dflash_local.engine.load_pair import load as load_pair
        from dflash_local.load_config import LoadConfig

        return load_pair(find_pair("demo"), LoadConfig(device="cpu"))

    api = client(serve(model=lambda _scripted: Model("demo", load)))
    asked = [{"role": "user", "content": "Count from 3 to 7."}]
    told: dict[str, Any] = {"system": "Be brief.", "tools": [ADD], "thinking": {"type": "adaptive"}}
    more: dict[str, Any]
    for more in ({}, told):
        counted = api.messages.count_tokens(model="demo", messages=asked, **more).input_tokens
        whole = api.messages.create(model="demo", max_tokens=48, messages=asked, **more)
        assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    whole = api.messages.create(model="demo", max_tokens=48, messages=asked)
    text = whole.content[0].text
    with api.messages.stream(model="demo", max_tokens=48, messages=asked) as stream:
        assert "".join(stream.text_stream) == text
    stop = text[3:5]
    cut = api.messages.create(model="demo", max_tokens=48, messages=asked, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
