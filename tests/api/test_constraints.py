"""What each dialect asks of a reply's text becomes one constraint of the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dflash_local.api import messages, responses
from dflash_local.api.request_body import ParsedRequest
from dflash_local.request import Constraint
from tests.api.bodies import chat, find, refusal, text

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}
HELD = Constraint("json_schema", json.dumps(SCHEMA, ensure_ascii=False))
NAMED = {"type": "json_schema", "name": "x", "schema": SCHEMA}
OPENAI = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
Read = Callable[..., ParsedRequest]


def message(**fields: Any) -> ParsedRequest:
    asked = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return messages.read(json.dumps({**asked, **fields}).encode(), find)


def response(**fields: Any) -> ParsedRequest:
    return responses.read(json.dumps({"model": "scripted", "input": "hi", **fields}).encode(), find)


READERS: list[Read] = [chat, text, message, response]


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (chat, OPENAI),
        (text, OPENAI),
        (response, {"text": {"format": NAMED}}),
        (message, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (message, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
    ids=["chat", "completions", "responses", "output_format", "output_config"],
)
def test_a_schema_in_the_dialects_own_field_is_held_to(read: Read, fields: dict[str, Any]) -> None:
    assert read(**fields).request.constraint == HELD and not read(**fields).taken
    assert read().request.constraint is None
    for said in read(**fields).request.messages:
        assert json.dumps(SCHEMA, ensure_ascii=False) in said.content


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, HELD),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, HELD),
        ({"structured_outputs": {"json_object": True}}, Constraint("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("lark", 'start: "a"')),
        ({"structured_outputs": {"choice": ["a", 'b"\n']}}, Constraint("lark", 'start: "a" | "b\\"\\n"')),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_json": SCHEMA}, HELD),
        ({"guided_json": {}}, Constraint("json_object")),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_grammar": 'root ::= "a"'}, Constraint("lark", 'root ::= "a"')),
        ({"guided_choice": ["a", "b"]}, Constraint("lark", 'start: "a" | "b"')),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_fields_of_vllm_are_taken_in_every_dialect(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert [read(**fields).request.constraint for read in READERS] == [constraint] * len(READERS)


def test_any_object_is_asked_for_where_no_schema_is_given() -> None:
    for read, fields in (
        (chat, {"response_format": {"type": "json_object"}}),
        (response, {"text": {"format": {"type": "json_object"}}}),
    ):
        assert read(**fields).request.constraint == Constraint("json_object")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"guided_regex": "a" * (2**18 + 1)}, "guided_regex", "262144 allowed"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar", "both given"),
        ({**OPENAI, "guided_regex": "a"}, "guided_regex", "both given"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "is unknown"),
        ({"guided_choice": []}, "guided_choice", "1 to 10,000"),
        ({"grammar": "root ::= x"}, "grammar", "use structured_outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_refused_by_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(chat, **fields)
    assert error["param"] == param and words in error["message"]


ADD = {"name": "add", "parameters": {"type": "object"}}
NOW = {"name": "now"}
OFFERED: dict[Read, Any] = {
    chat: [{"type": "function", "function": each} for each in (ADD, NOW)],
    response: [{"type": "function", **each} for each in (ADD, NOW)],
    message: [{"name": "add", "input_schema": {"type": "object"}}, {"name": "now", "input_schema": {}}],
}


@pytest.mark.parametrize(
    ("read", "any_tool", "named"),
    [
        (chat, "required", {"type": "function", "function": {"name": "now"}}),
        (response, "required", {"type": "function", "name": "now"}),
        (message, {"type": "any"}, {"type": "tool", "name": "now"}),
    ],
    ids=["chat", "response", "message"],
)
def test_a_call_that_is_demanded_names_the_tools(read: Read, any_tool: Any, named: Any) -> None:
    tools = OFFERED[read]
    assert read(tools=tools).request.must_call == ()
    assert read(tools=tools, tool_choice=any_tool).request.must_call == ("add", "now")
    assert read(tools=tools, tool_choice=named).request.must_call == ("now",)
    assert len(read(tools=tools, tool_choice=named).request.tools) == 2, "the prompt is the same"
    assert "not among the tools" in refusal(read, tools=tools[:1], tool_choice=named)["message"]
    assert "there are no tools" in refusal(read, tool_choice=any_tool)["message"]
    assert (
        "format is asked for as well"
        in refusal(read, tools=tools, tool_choice=named, structured_outputs={"regex": "a"})["message"]
    )
