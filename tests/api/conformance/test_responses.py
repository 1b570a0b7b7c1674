"""OpenAI's responses by the cases of openresponses' and vLLM's suites that ``tests/api/test_responses.py`` has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_local.api import responses
from dflash_local.api.request_body import ParsedRequest
from dflash_local.errors import ContextError
from dflash_local.events import Event, Finished, Piece, Step, Usage
from dflash_local.request import Constraint, Limits, Message, ToolCall
from dflash_local.schema import convert
from tests.api.bodies import find, refusal
from tests.api.conformance.whole_replies import WholeResponse
from tests.api.conforming import conforms
from tests.api.conftest import Running, Serve
from tests.service.scripted import HELLO, PromptFault, ScriptedSession

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
NOT_APPLICABLE = {
    "openresponses": {
        "no model here reads pictures or files": "image-input file-input",
        "nothing is stored: clients send the whole history": "previous-response-id function-call-roundtrip",
        "tools are run by the client": "file-search offline-web-search",
        "there is no websocket": "websocket-response websocket-sequential-responses websocket-continuation "
        "websocket-reconnect-store-false-recovery websocket-previous-response-not-found "
        "websocket-failed-continuation-evicts-cache websocket-compact-new-chain",
    },
    "vllm responses": {
        "nothing is stored: clients send the whole history": "store background background_error background_cancel "
        "cancel_completed two_responses_with_same_prev_id store_omitted_defaults_to_true store_explicit_true "
        "store_explicit_false store_explicit_null_resolves_to_default background_with_store_null_is_allowed "
        "background_with_store_false_still_rejected previous_response_id "
        "retrieve_without_store_returns_501 state.py store.py store_backends.py store_config.py "
        "store_recovery.py serving_stateless.py",
        "there is no websocket": "websocket.py websocket_gpu.py websocket_integration.py websocket_real.py",
        "tools are run by the client": "mcp_tools.py file_search_handler.py parsable_context.py "
        "parsable_context_deferred.py parsable_context_unit.py extract_tool_types initialize_tool_sessions "
        "extract_allowed_tools_basic_formats extract_allowed_tools_star_normalization "
        "browser_find_uses_responses_action_type",
        "of vLLM's reading and writing of harmony; the chat template and the parser of calls do it here": "harmony.py "
        "harmony_utils.py harmony_max_tokens_tool_loop.py response_input_to_harmony.py tool_choice_harmony.py",
        "no model here reads pictures": "single_chat_session_image single_chat_session_image_base64encoded "
        "multi_image_input",
        "log probabilities are told by chats and completions": "logprobs streaming_logprobs",
        "the prompt's tokens are told by chats and completions": "enable_response_messages",
        "input_tokens are counted by /v1/messages/count_tokens": "count_responses_input_tokens",
        "what a turn of the assistant says and calls is one message": "message_then_call_not_merged",
        "all parts of a summary are read": "summary_with_multiple_entries_uses_first",
        "the arguments of a call come whole, in one delta": "arguments_done_emitted_without_deltas",
        "a reply is not gone on with": "in_progress_message_returns_true incomplete_message_returns_true",
        "of vLLM's classes, no behaviour of the endpoint": "serialize_message serialize_messages errors.py "
        "validator_handles_iterator_input validator_handles_empty_iterator direct_function_call_object_preservation "
        "function_call_validation_failure_logs_debug original_code_would_crash structural_tag_only_returns_none",
        "names of tools count as the text of the prompt": "namespace_tool_budget.py",
        "two different constraints are a 400": "text_format_takes_precedence",
        "thoughts of another server that are only encrypted are left out, not refused": "encrypted_content_raises",
    },
}  # fmt: skip


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "hi", **fields}


def read(**fields: Any) -> ParsedRequest:
    return responses.read(json.dumps(body(**fields)).encode(), find)


def said(role: str, text: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def part(text: str, kind: str = "input_text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text}]


def thought(**more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], **more}


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": arguments}


def gave(number: int, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def made(*calls: ToolCall) -> Message:
    return Message("assistant", "", "", calls)


USER, ONE, TWO = Message("user", "hi"), ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}")
NESTED = json.dumps({"filters": {"place": {"city": "Ulm"}, "days": [1, 2]}})


@pytest.mark.parametrize(
    ("sent", "turns"),
    [
        pytest.param(
            [call(1), call(2), gave(1, "a"), gave(2, "b")],
            [made(ONE, TWO), Message("tool", "a", tool_call_id="c1"), Message("tool", "b", tool_call_id="c2")],
            marks=conforms("vllm responses", "two_consecutive_calls_merged three_consecutive_calls_merged "
                           "parallel_calls_then_outputs mixed_function_call_and_output "
                           "function_call_output_not_affected function_call_dict_coerced_and_call_id_required"),
        ),
        pytest.param(
            [call(1), gave(1, "a"), call(2)],
            [made(ONE), Message("tool", "a", tool_call_id="c1"), made(TWO)],
            marks=conforms("vllm responses", "tool_output_between_calls_breaks_merge single_call_unchanged "
                           "function_call_dict_converted_to_object mixed_input_types_with_function_calls"),
        ),
        pytest.param(
            [said("assistant", part("Hello", "output_text")), call(1)],
            [Message("assistant", "Hello", "", (ONE,))],
            id="a-turn-that-speaks-and-calls",
        ),
        pytest.param(
            [call(1, NESTED)],
            [made(ToolCall("c1", "f", NESTED))],
            marks=conforms("vllm responses", "function_call_with_complex_arguments"),
        ),
        pytest.param(
            [thought(content=part("so", "reasoning_text"), summary=part("no", "summary_text"), id="rs_1"), call(1)],
            [Message("assistant", "", "so", (ONE,))],
            marks=conforms("vllm responses", "construct_chat_messages_with_tool_call content_preferred_over_summary "
                           "content_only reasoning_item_missing_id_is_backfilled "
                           "reasoning_item_existing_id_preserved no_warning_when_content_used"),
        ),
        pytest.param(
            [thought(summary=part("in short", "summary_text"), content=[]), said("assistant", []), said("user", "hi")],
            [Message("assistant", "", "in short"), USER],
            marks=conforms("vllm responses", "summary_fallback_when_no_content summary_fallback_when_content_empty "
                           "construct_chat_messages_preserves_single_item_conversions extract_content_text"),
        ),
        pytest.param(
            [said("user", "hi"), thought(encrypted_content=None), said("user", part("go on"))],
            [USER, Message("assistant", ""), Message("user", "go on")],
            marks=conforms("vllm responses", "neither_content_nor_summary user_message_untouched chat_with_input_type"),
        ),
        pytest.param(
            [said("user", "hi"), {**said("assistant", [{**part("Yes.", "output_text")[0], "annotations": [
                {"type": "url_citation", "url": "http://x"}]}]), "id": "msg_1", "status": "completed"},
             thought(id="rs_1", status="completed"), said("user", "hi")],
            [USER, Message("assistant", "Yes."), USER],
            marks=conforms("vllm responses", "input_history_openai_shape_e2e input_history_openresponses_shape_e2e "
                           "assistant_output_message_existing_fields_preserved "
                           "multiturn_history_replay_without_ids_e2e "
                           "assistant_output_message_missing_id_status_annotations"),
        ),
        pytest.param(
            [said("developer", part("Extra hint.")), said("user", part("hi"))],
            [Message("system", "Base policy.\n\nExtra hint."), USER],
            marks=conforms("vllm responses", "responses_request_folds_developer_messages_into_instructions "
                           "responses_request_appends_developer_to_existing_instructions instructions"),
        ),
        pytest.param(
            "hi", [Message("system", "Base policy."), USER],
            marks=conforms("vllm responses", "string_input_returns_false string_input_not_affected "
                           "non_dict_and_typeless_items_pass_through"),
        ),
    ],
)  # fmt: skip
def test_items_become_turns(sent: Any, turns: list[Message]) -> None:
    instructions = turns[0].content.partition("\n")[0] if turns[0].role == "system" else None
    assert read(input=sent, instructions=instructions).request.messages == tuple(turns)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id",
                     marks=conforms("vllm responses", "invalid_function_call_fallback")),
        pytest.param({"input": []}, "input",
                     marks=conforms("vllm responses", "empty_list_input empty_list_returns_false")),
        pytest.param({"input": [said("assistant", "42.")]}, "input",
                     marks=conforms("vllm responses", "completed_message_returns_false")),
        pytest.param({"seed": 2**64}, "seed", marks=conforms("vllm responses", "seed_bounds_validation")),
        pytest.param({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
                     "structured_outputs.regex",
                     marks=conforms("vllm responses", "structured_outputs_and_json_schema_conflict")),
        pytest.param({"previous_response_id": "resp_1"}, "previous_response_id",
                     marks=conforms("vllm responses", "previous_response_id_without_store_returns_400")),
        pytest.param({"background": True}, "background",
                     marks=conforms("vllm responses", "background_requires_store_enabled")),
        pytest.param({"input": [said("user", [*part("What?"), {"type": "input_image", "image_url": "data:,"}])]},
                     "input[0].content[1].type"),
        pytest.param({"input": [call(1), gave(1, [*part("Look:"), {"type": "input_image", "image_url": "data:,"}])]},
                     "input[1].output[1].type"),
        pytest.param({"input": [said("user", [{"type": "input_file", "file_data": "x"}])]}, "input[0].content[0].type"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(read, **fields)
    assert error["param"] == param
    assert not param.endswith("type") or "the model reads no pictures" in error["message"]


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


@conforms("vllm responses", "basic_sampling_params extra_sampling_params stop_string_conversion default_values")
def test_how_is_sampled() -> None:
    request = read(temperature=0.8, top_p=0.95, top_k=50, max_output_tokens=100, repetition_penalty=1.2, seed=42,
                   presence_penalty=1, stop="STOP").request  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.8, 0.95, 50, 42)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, 1)
    assert request.limits == Limits(100, ("STOP",)) and read(stop=["A", "B"]).request.limits.stop == ("A", "B")
    assert read().request.limits.stop == () and read().request.sampling.repetition_penalty == 1


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        pytest.param({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
                     Constraint("json_schema", json.dumps(SCHEMA)),
                     marks=conforms("vllm responses", "extracts_from_text_format_json_schema structured_output")),
        pytest.param({"text": {"format": {"type": "json_object"}}}, Constraint("json_object"),
                     marks=conforms("vllm responses", "text_format_json_object_enables_structured_outputs")),
        pytest.param({"text": {"format": {"type": "text"}}}, None,
                     marks=conforms("vllm responses", "returns_none_for_text_format returns_none_for_no_format")),
        pytest.param({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", json.dumps(SCHEMA)),
                     marks=conforms("vllm responses", "extracts_from_structured_outputs_json json_schema_dict")),
        pytest.param({"structured_outputs": {"json": json.dumps(SCHEMA)}},
                     Constraint("json_schema", json.dumps(SCHEMA)),
                     marks=conforms("vllm responses", "json_schema_string_is_parsed")),
        pytest.param({"structured_outputs": {"json_object": True}}, Constraint("json_object"),
                     marks=conforms("vllm responses", "json_object")),
        pytest.param({"structured_outputs": {"regex": r"\d+"}}, Constraint("regex", r"\d+"),
                     marks=conforms("vllm responses", "regex")),
        pytest.param({"structured_outputs": {"grammar": "root ::= 'hello'"}}, Constraint("lark", "root ::= 'hello'"),
                     marks=conforms("vllm responses", "grammar structured_outputs_passed_through")),
        pytest.param({"structured_outputs": {"choice": ["yes", "no"]}}, Constraint("lark", 'start: "yes" | "no"'),
                     marks=conforms("vllm responses", "choice")),
    ],
)  # fmt: skip
def test_what_the_text_is_held_to(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert read(**fields).request.constraint == constraint


@conforms("vllm responses", "responses_honors_default_chat_template_kwargs "
          "responses_request_chat_template_kwargs_override_server_default")  # fmt: skip
def test_thinking_is_the_models_own_or_as_asked() -> None:
    assert not read().request.thinking and read(reasoning={"effort": "low"}).request.thinking
    asked = read(reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": False}).request
    assert not asked.thinking and asked.reasoning_effort == "low"


class Thinking(ScriptedSession):
    """Two of its six tokens are thoughts."""

    def _events(self, *arguments: Any) -> Iterator[Event]:
        for event in super()._events(*arguments):
            yield replace(event, usage=Usage(5, 6, 2)) if isinstance(event, Finished) else event


THINKS = (
    Step((Piece("so", "thinking"),), (1, 2), 0, 0, 0, 0.1),
    Step((Piece("Yes"), Piece(".")), (3, 4, 5, 6), 0, 0, 0, 0.1),
)


@pytest.mark.parametrize(
    ("sent", "steps", "kinds"),
    [
        pytest.param(
            {"input": [said("user", "Say hello in exactly 3 words.")]}, (), ["message"],
            marks=[conforms("openresponses", "basic-response"), conforms("vllm responses", "basic completed_status "
                   "simple_input no_errors_for_plain_request store_disabled_does_not_save")],
        ),
        pytest.param(
            {"input": [said("system", "You are a pirate."), said("user", "Say hello.")]}, (), ["message"],
            marks=conforms("openresponses", "system-prompt"),
        ),
        pytest.param(
            {"input": [said("user", "My name is Alice."), said("assistant", "Hello!"), said("user", "What is it?")]},
            (), ["message"], marks=[conforms("openresponses", "multi-turn"), conforms("vllm responses", "chat")],
        ),
        pytest.param(
            {"tools": [WEATHER]}, (Step((Piece(CALL),), (1,), 0, 0, 0, 0.1),), ["function_call"],
            marks=[conforms("openresponses", "tool-calling"), conforms("vllm responses", "function_tool_use")],
        ),
        pytest.param(
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
            (Step((Piece(CALL),), (1,), 0, 0, 0, 0.1),), ["function_call"],
            marks=conforms("vllm responses", "named_tool_use"),
        ),
        ({"input": [said("user", "hi"), call(1), gave(1, "64 degrees")], "tools": [WEATHER]}, (), ["message"]),
        pytest.param(
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "store": True,
             "parallel_tool_calls": False, "reasoning": {"effort": "low"}, "service_tier": "flex"},
            THINKS, ["reasoning", "message"],
            marks=conforms("vllm responses", "non_streaming response_created_event_uses_public_json_schema_alias "
                           "reasoning_item non_streaming_reasoning_tokens_e2e "
                           "reasoning_tokens_counted_for_text_reasoning_model structured_output_with_parse"),
        ),
    ],
)  # fmt: skip
def test_a_whole_response_has_every_field(
    serve: Serve, sent: dict[str, Any], steps: tuple[Step, ...], kinds: list[str]
) -> None:
    whole = serve(Thinking(steps=steps or HELLO)).call("POST", PATH, body(**sent)).json
    convert(whole, WholeResponse)
    assert whole["status"] == "completed" and whole["completed_at"] >= whole["created_at"]
    assert [item["type"] for item in whole["output"]] == kinds
    assert all(item["id"] and item["status"] == "completed" for item in whole["output"])
    parts = [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    assert all(set(part) == {"type", "text", "annotations", "logprobs"} for part in parts)
    assert whole["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 11,
    }  # fmt: skip
    assert [{"description", "strict", "parameters"} <= set(tool) for tool in whole["tools"]] == [True] * len(
        whole["tools"]
    )
    if "text" in sent:
        assert whole["text"]["format"] == {**sent["text"]["format"], "description": None, "strict": True}
        assert whole["reasoning"] == {"effort": "low", "summary": None}
    else:
        assert whole["text"] == {"format": {"type": "text"}}


def events_of(server: Running, **fields: Any) -> list[dict[str, Any]]:
    answer = server.call("POST", PATH, body(stream=True, **fields))
    return [json.loads(frame.partition("data: ")[2]) for frame in answer.body.decode().split("\n\n") if frame]


@pytest.mark.parametrize(
    ("texts", "tools"),
    [
        pytest.param(("Hello", ", world"), [], marks=[
            conforms("openresponses", "streaming-response"),
            conforms("vllm responses", "streaming streaming_types streaming_output_consistency"),
        ]),
        pytest.param(("~so", "~ it is", "Well: ", f"{CALL}{CALL}", "Done."), [WEATHER], marks=[
            conforms("openresponses", "tool-calling-streaming"),
            conforms("vllm responses", "function_calling_with_streaming_types reasoning_to_content_transition "
                     "function_calling_with_streaming_expected_arguments parallel_tool_calls "
                     "streaming_reasoning_tokens_e2e all_three_fields tool_calls_grouped_by_index "
                     "all_three_states split_name_and_args_same_index"),
        ]),
    ],
)  # fmt: skip
def test_every_event_is_inside_the_one_that_opened_it(
    serve: Serve, texts: tuple[str, ...], tools: list[dict[str, Any]]
) -> None:
    """What is opened is closed in turn, with the ids and places of its opening; the last response has all of it."""
    pieces = [Piece(text.lstrip("~"), "thinking" if text[0] == "~" else "final") for text in texts]
    steps = [Step((piece,), (1,), 0, 0, 0, 0.1) for piece in pieces]
    first, second, *middle, last = events_of(serve(Thinking(steps=steps)), tools=tools)
    assert [one["type"] for one in (first, second, last)] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip
    fields = set(last["response"]) - {"metrics"}
    assert all(set(one["response"]) == fields and one["response"]["usage"] is None for one in (first, second))
    convert(last["response"], WholeResponse)
    item: dict[str, Any] | None = None
    text, at = "", -1
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert item is None and event["output_index"] == at + 1 and event["item"]["status"] == "in_progress"
            item, at, text = event["item"], at + 1, ""
            continue
        assert item is not None and event["output_index"] == at
        if kind == "output_item.done":
            assert event["item"] == last["response"]["output"][at] and event["item"]["id"] == item["id"]
            item = None
            continue
        assert event["item_id"] == item["id"] and event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith((".text.done", "_text.done", "arguments.done")):
            assert text == event.get("text", event.get("arguments"))
    assert item is None and at == len(last["response"]["output"]) - 1
    assert last["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param({}, marks=conforms("vllm responses", "max_tokens incomplete_status_on_length")),
        pytest.param(
            {"tools": [WEATHER], "tool_choice": "required"},
            marks=conforms("vllm responses", "max_tokens_with_tool_choice_required"),
        ),
    ],
)
def test_what_was_cut_says_so(serve: Serve, sent: dict[str, Any]) -> None:
    whole = serve(ScriptedSession(end="length")).call("POST", PATH, body(max_output_tokens=6, **sent)).json
    convert(whole, WholeResponse)
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"} and whole["completed_at"] is None
    assert whole["output"][-1]["status"] == "incomplete" and whole["max_output_tokens"] == 6


@conforms(
    "vllm responses", "validate_generator_input prompt_at_limit_fails prompt_over_limit_fails valid_prompt_passes"
)
def test_a_prompt_that_is_too_long_is_a_400(serve: Serve) -> None:
    server = serve(ScriptedSession(faults=[PromptFault(ContextError("200 tokens, 100 allowed"))]))
    answer = server.call("POST", PATH, body(stream=True))
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert server.call("POST", PATH, body()).status == 200


@conforms("vllm responses", "not_found_returns_error cancel_not_found cancel_without_store_unknown_id_returns_404")
@pytest.mark.parametrize(("method", "path"), [("GET", "resp_1"), ("POST", "resp_1/cancel"), ("DELETE", "resp_1")])
def test_nothing_was_kept(server: Running, method: str, path: str) -> None:
    answer = server.call(method, f"{PATH}/{path}", b"{}" if method == "POST" else None)
    assert answer.status == 404 and answer.error["type"] == "not_found_error"
