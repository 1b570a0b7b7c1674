"""OpenAI's responses: bodies as Codex sends them, events in their order, and the openai client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_local.api import responses
from dflash_local.api.request_body import ParsedRequest
from dflash_local.events import Finished, Piece, Step
from dflash_local.request import Limits, Message, ToolCall
from tests.api.bodies import find, refusal
from tests.api.conforming import conforms
from tests.api.conftest import TOOL, Running, Serve
from tests.service.scripted import ScriptedSession

PATH = "/v1/responses"
SCHEMA = TOOL["function"]["parameters"]  # type: ignore[index]
ADD = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: P"},
}
GROUP = {"type": "namespace", "name": "mcp__maths", "description": "sums", "tools": [{**ADD, "defer_loading": True}]}
TOOLS = [ADD, PATCH, GROUP, {"type": "web_search", "external_web_access": True}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "hi", **fields}


def read(**fields: Any) -> ParsedRequest:
    return responses.read(json.dumps(body(**fields)).encode(), find)


def calls(*texts: str) -> list[Step]:
    """Steps of a reply that thinks, speaks and calls: each step is five characters long."""
    text = "".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    pieces = [Piece("I thi", "thinking"), Piece("nk", "thinking"), Piece("Done.")]
    pieces += [Piece(text[at : at + 5]) for at in range(0, len(text), 5)]
    return [Step((piece,), (1,), 0, 0, 0, 0.1) for piece in pieces]


CALLS = calls(
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "mcp__maths.add", "arguments": {"a": 2}}',
    '{"name": "apply_patch", "arguments": {"input": "*** Begin"}}',
)


@conforms("vllm responses", "namespace_tool_accepted_in_request construct_tool_dicts_flattens_namespace "
          "construct_tool_dicts_none_for_tool_choice_none plain_function_tool_not_flattened "
          "in_budget_namespace_tool_names_remain_allowed")  # fmt: skip
def test_a_conversation_as_codex_sends_it() -> None:
    def said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    parsed = read(
        instructions="You are Codex.",
        input=[
            said("developer", "Be brief."),
            said("user", "one"),
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}],
             "encrypted_content": "of another server"},
            {**said("assistant", "I add.", "output_text"), "phase": "commentary"},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
            {"type": "function_call", "call_id": "c2", "namespace": "mcp__maths", "name": "add", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "ok"},
            said("developer", "Be quick."),
            {"role": "user", "content": "go on"},
        ],
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "low", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"x": "y"},
        max_output_tokens=9,
        text={"verbosity": "low"},
    )  # fmt: skip
    made = (
        ToolCall("c1", "add", '{"a": 1}'),
        ToolCall("c2", "mcp__maths.add", "{}"),
        ToolCall("c3", "apply_patch", '{"input": "*** Begin"}'),
    )
    assert parsed.request.messages == (
        Message("system", "You are Codex.\n\nBe brief."),
        Message("user", "one"),
        Message("assistant", "I add.", "so", made),
        Message("tool", "3", tool_call_id="c1"),
        Message("tool", "0", tool_call_id="c2"),
        Message("tool", "ok", tool_call_id="c3"),
        Message("user", "Be quick."),
        Message("user", "go on"),
    )
    add, patch, group = (tool["function"] for tool in parsed.request.tools)
    assert add == {"name": "add", "description": "adds", "parameters": SCHEMA}
    assert group == {**add, "name": "mcp__maths.add"}
    assert patch["parameters"] == responses.FREE_FORM and patch["description"].endswith("start: P")
    assert parsed.request.thinking and parsed.request.reasoning_effort == "low" and parsed.stream
    assert parsed.request.limits == Limits(9)
    named = " ".join(parsed.taken)
    for field in ("input[].phase", "tools[].strict", "tools[].tools[].defer_loading", "include", "client_metadata"):
        assert f"{field}: " in named
    assert "tools: web_search is not run here" in named
    assert read(tools=TOOLS, tool_choice="none").request.tools == ()
    assert not read(reasoning={"effort": "none"}).request.thinking
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert '{"type": "object"}' in read(text={"format": form}).request.messages[0].content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "assistant", "content": "{"}]}, "input"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(read, **fields)
    assert error["param"] == param, error


@conforms("vllm responses", "namespace_tool_call_split_on_output plain_tool_call_has_no_namespace "
          "namespace_tool_separator streaming_namespace_tool_call_split custom_tool_input_events "
          "streaming_done_event_carries_namespace_and_args namespace_tool_separator_streaming")  # fmt: skip
def test_the_events_of_a_stream(serve: Serve) -> None:
    """Items are whole in their last event, and the same in the response at the end."""
    server = serve(ScriptedSession(steps=CALLS))
    answer = server.call("POST", PATH, body(tools=TOOLS, stream=True))
    frames = [frame.split("\n") for frame in answer.body.decode().split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds[2:9] == [
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done",
    ]  # fmt: skip
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done and {item["status"] for item in added} == {"in_progress"}
    assert [item["id"] for item in added] == [item["id"] for item in done]
    thought, said, add, group, patch = done
    assert thought["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert said["content"][0]["text"] == "Done." and {item["status"] for item in done} == {"completed"}
    assert (add["type"], add["name"], add["arguments"]) == ("function_call", "add", '{"a": 1}')
    assert (group["namespace"], group["name"]) == ("mcp__maths", "add") and "namespace" not in add
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    for item, kind in ((add, "function_call_arguments"), (patch, "custom_tool_call_input")):
        deltas = [
            each for each in events if each.get("item_id") == item["id"] and each["type"].endswith(f"{kind}.delta")
        ]
        assert "".join(each["delta"] for each in deltas) in (item.get("arguments"), item.get("input"))
    whole = server.call("POST", PATH, body(tools=TOOLS)).json
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in done]
    assert whole["usage"] == events[-1]["response"]["usage"] and whole["status"] == "completed"


def test_events_are_numbered_in_their_order_where_nothing_is_said_of_the_prompt(serve: Serve) -> None:
    """As by a server of another program."""

    class Silent(ScriptedSession):
        def _events(self, *arguments: Any) -> Iterator[Any]:
            yield from (event for event in super()._events(*arguments) if isinstance(event, (Step, Finished)))

    answer = serve(Silent()).call("POST", PATH, body(stream=True)).body.decode()
    events = [json.loads(frame.partition("data: ")[2]) for frame in answer.split("\n\n") if frame]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"


def test_a_reply_that_is_too_long_is_incomplete(serve: Serve) -> None:
    server = serve(ScriptedSession(end="length"))
    whole = server.call("POST", PATH, body()).json
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert b"event: response.incomplete\n" in server.call("POST", PATH, body(stream=True)).body


def test_a_fault_ends_a_stream_as_failed(serve: Serve) -> None:
    answer = serve(ScriptedSession(faults=[RuntimeError("dead")])).call("POST", PATH, body(stream=True))
    last = json.loads(answer.body.decode().strip().rpartition("data: ")[2])
    assert last["type"] == "response.failed" and "dead" in last["response"]["error"]["message"]


@pytest.fixture
def openai() -> Any:
    """The library, which is not installed for the other Pythons that are tested."""
    return pytest.importorskip("openai")


@pytest.fixture
def client(openai: Any) -> Iterator[Callable[[Running], Any]]:
    made: list[Any] = []

    def connect(server: Running) -> Any:
        address = f"http://127.0.0.1:{server.port}/v1"
        made.append(openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def test_the_openai_client_reads_everything(
    openai: Any, client: Callable[[Running], Any], serve: Serve, server: Running
) -> None:
    api = client(server)
    whole = api.responses.create(model="scripted", input="hi", instructions="Be brief.")
    assert whole.output_text == "Hello, world!\n" and whole.usage.total_tokens == 11
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    with client(serve(ScriptedSession(steps=CALLS))).responses.stream(
        model="scripted", input="hi", tools=TOOLS
    ) as stream:
        last = stream.get_final_response()
    assert last.output_text == "Done." and [item.type for item in last.output[2:]] == [
        "function_call", "function_call", "custom_tool_call",
    ]  # fmt: skip
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="scripted", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
