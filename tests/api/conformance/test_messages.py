"""Anthropic's dialect by the cases of llama.cpp's and vLLM's suites that ``tests/api/test_messages.py`` has not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_local.api import messages
from dflash_local.events import Event, Piece, Started, Step
from dflash_local.request import Limits, Message, Request, ToolCall
from dflash_local.schema import convert
from tests.api.bodies import find, refusal
from tests.api.conformance.whole_replies import AssistantMessage
from tests.api.conforming import conforms
from tests.api.conftest import Running, Serve
from tests.service.scripted import ScriptedSession

PATH = "/v1/messages"
HI = {"role": "user", "content": "hi"}
ADD = {"name": "add", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BILLING = "x-anthropic-billing-header: cc_version=2.1.160; cch=d1d48;"
NOT_APPLICABLE = {
    "llama.cpp": {
        "no model here reads pictures": "vision_base64_with_multimodal_model",
        "Anthropic's API refuses a conversation without messages, and so is done here": "empty_messages",
    },
    "vllm anthropic": {
        "no model here reads pictures": "base64_source base64_png url_source missing_type_defaults_to_base64 "
        "missing_media_type_defaults_to_jpeg url_source_missing_url_returns_empty empty_source_returns_data_uri_shell "
        "image_block_with_source_passes base64_image_in_user_message url_image_in_user_message tool_result_with_image "
        "tool_result_with_text_and_image tool_result_with_multiple_images image_block",
        "fields of vLLM's engine": "vllm_xargs_passed_through vllm_xargs_reaches_sampling_params_with_kv_transfer "
        "cache_salt_passed_through cache_salt_defaults_to_none cache_salt_openapi_requires_non_empty_string "
        "empty_cache_salt_returns_bad_request",
        "no such step exists here: there is no stream of OpenAI's below": "parse_streaming_error_chunk "
        "buffered_content_flushed_on_done_without_usage_chunk serving_protocol_exports_are_importable "
        "async_serving_chat_init serialize_messages_response",
        "an answer of nothing is an empty list, as Anthropic's API has it": "empty_completion_emits_one_text_block",
        "a system turn among the others is the user's: most templates refuse it": "qwen_template_requires_merge "
        "no_restriction_no_merge no_template_defaults_merge inline_system_string_only inline_system_list_content "
        "multiple_inline_system_messages inline_system_with_top_level_string "
        "inline_system_merged_with_top_level_system inline_system_billing_header_mixed_with_content "
        "multiple_system_messages_preserve_order",
        "tokens from the cache are told in the first event, too, and never left out": "no_prompt_tokens_details "
        "streaming_cache_fields_absent_then_populated streaming_no_prompt_tokens_details_at_all",
        "what is left out has one meaning, and clients leave it out": "tool_use_missing_input_raises "
        "thinking_block_missing_thinking_raises redacted_thinking_missing_data_raises "
        "redacted_thinking_empty_data_raises",
        "thinking has no budget here: budget and display are taken and named": "enabled_sets_thinking_token_budget "
        "rejects_invalid_thinking display_keeps_reasoning_included",
        "thinking is switched by enable_thinking alone": "disabled_overrides_output_config_effort "
        "disabled_uses_configured_effort template_honors_none template_ignores_effort "
        "template_renders_none_as_thinking_effort renderer_rejects_none",
        "JSON of an unknown block is not shown to the model: it is a 400": "unknown_block_preserved_as_json",
    },
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 50, "messages": [HI], **fields}


def read(**fields: Any) -> messages.ParsedRequest:
    return messages.read(json.dumps(body(**fields)).encode(), find)


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def thought(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": "s"}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


def session(*texts: str) -> ScriptedSession:
    return ScriptedSession(steps=[Step((Piece(said),), (1,), 0, 0, 0, 0.1) for said in texts])


USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
MADE = ToolCall("t1", "add", '{"a": 1}')
IMAGES = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}},
]


@pytest.mark.parametrize(
    ("sent", "system", "turns"),
    [
        pytest.param(
            [HI, blocks(USE, role="assistant"), blocks(text("Here:"), result("4"))],
            None,
            [Message("user", "hi"), Message("assistant", "", "", (MADE,)), Message("tool", "4", tool_call_id="t1"),
             Message("user", "Here:")],
            marks=[conforms("llama.cpp", "tool_result tool_result_with_text"),
                   conforms("vllm anthropic", "tool_result_string_content tool_use_valid_passes plain_string "
                            "tool_result_no_follow_up_when_no_images tool_result_with_content_passes")],
            id="text-before-a-result",
        ),
        pytest.param(
            [HI, blocks({**USE, "input": {}}, role="assistant"), blocks(result([text("1"), text("2")]), result(None))],
            None,
            [Message("user", "hi"), Message("assistant", "", "", (ToolCall("t1", "add", "{}"),)),
             Message("tool", "1\n\n2", tool_call_id="t1"), Message("tool", "", tool_call_id="t1")],
            marks=conforms("vllm anthropic", "tool_result_text_blocks tool_result_none_content none single_text_block "
                           "multiple_text_blocks does_not_produce_python_repr tool_use_empty_input_dict_passes "
                           "tool_result_valid_passes"),
            id="results-of-blocks",
        ),
        pytest.param(
            [HI, blocks(USE, role="assistant"), blocks(result([{"type": "tool_reference", "tool_name": "search"}]))],
            None,
            [Message("user", "hi"), Message("assistant", "", "", (MADE,)),
             Message("tool", "search", tool_call_id="t1")],
            marks=conforms("vllm anthropic", "tool_reference_block_passes"),
            id="a-tool-that-was-found",
        ),
        pytest.param(
            [HI, blocks(thought("a. "), thought("b."), text("Done."), role="assistant"), HI,
             blocks(thought("only"), role="assistant"), HI, {"role": "assistant", "content": "Hello!"}, HI],
            None,
            [Message("user", "hi"), Message("assistant", "Done.", "a. b."), Message("user", "hi"),
             Message("assistant", "", "only"), Message("user", "hi"), Message("assistant", "Hello!"),
             Message("user", "hi")],
            marks=conforms("vllm anthropic", "multiple_thinking_blocks_concatenated thinking_only_in_assistant_message "
                           "no_thinking_blocks_unchanged multi_turn_with_thinking_blocks thinking_block_valid_passes"),
            id="thinking-of-earlier-turns",
        ),
        pytest.param(
            [HI, blocks({"type": "thinking", "thinking": ""}, text(""), USE, role="assistant"), blocks(result("4"))],
            None,
            [Message("user", "hi"), Message("assistant", "", "", (MADE,)), Message("tool", "4", tool_call_id="t1")],
            marks=conforms("vllm anthropic", "thinking_block_empty_string_passes thinking_block_no_signature_passes "
                           "text_block_empty_string_passes"),
            id="empty-blocks",
        ),
        pytest.param(
            [{"role": "system", "content": "First."}, blocks(text("Second."), role="system"), HI],
            "Top.",
            [Message("system", "Top.\n\nFirst.\n\nSecond."), Message("user", "hi")],
            marks=conforms("vllm anthropic", "string_system_message_is_hoisted block_list_system_message_is_hoisted "
                           "existing_top_level_system_is_kept_first hoisted_system_flows_through_conversion"),
            id="system-turns-that-come-first",
        ),
        pytest.param(
            [HI, {"role": "system", "content": "One."}, blocks(text("Two."), text("Three."), role="system"), HI],
            "Top.",
            [Message("system", "Top."), Message("user", "hi"), Message("user", "One."),
             Message("user", "Two.\n\nThree."), Message("user", "hi")],
            id="system-turns-among-the-others",
        ),
        pytest.param(
            [HI, {"role": "system", "content": BILLING}, blocks(text(BILLING), text("Real."), role="system"), HI],
            [text("You."), text(BILLING), text("Be concise.")],
            [Message("system", "You.\n\nBe concise."), Message("user", "hi"), Message("user", "Real."),
             Message("user", "hi")],
            marks=conforms("vllm anthropic", "inline_system_billing_header_stripped "
                           "system_without_billing_header_unchanged no_system_message_leaves_request_unchanged"),
            id="the-line-that-changes",
        ),
    ],
)  # fmt: skip
def test_a_conversation_becomes_turns(sent: list[Any], system: Any, turns: list[Message]) -> None:
    assert read(messages=sent, system=system).request.messages == tuple(turns)


@pytest.mark.parametrize(
    ("block", "param"),
    [
        pytest.param(USE | {"id": ""}, "id", marks=conforms("vllm anthropic", "tool_use_empty_id_raises")),
        pytest.param({"type": "tool_use", "name": "add", "input": {}}, "id",
                     marks=conforms("vllm anthropic", "tool_use_missing_id_raises")),
        pytest.param({"type": "tool_use", "id": "t1", "input": {}}, "id",
                     marks=conforms("vllm anthropic", "tool_use_missing_name_raises")),
        pytest.param(USE | {"name": ""}, "name", marks=conforms("vllm anthropic", "tool_use_empty_name_raises")),
        pytest.param(result("x") | {"tool_use_id": ""}, "tool_use_id",
                     marks=conforms("vllm anthropic", "tool_result_empty_tool_use_id_raises")),
        pytest.param({"type": "text"}, "text", marks=conforms("vllm anthropic", "text_block_none_text_raises")),
        pytest.param(result([{"type": "tool_reference"}]), "content[0].tool_name"),
        *(pytest.param(image, "type", marks=[
            conforms("llama.cpp", "vision_format_accepted"),
            conforms("vllm anthropic", "image_block_missing_source_raises"),
        ]) for image in IMAGES),
        *((result([text("Look:"), image]), "content[1].type") for image in IMAGES),
    ],
)  # fmt: skip
def test_a_block_that_cannot_be_read_is_named(block: dict[str, Any], param: str) -> None:
    error = refusal(read, messages=[blocks(text("What is this?"), block)])
    assert error["param"].startswith("messages[0].content[1]") and error["param"].endswith(param)
    assert not param.endswith("type") or "the model reads no pictures" in error["message"]


@conforms("llama.cpp", "missing_messages")
@conforms("vllm anthropic", "invalid_role_still_rejected")
def test_what_is_no_conversation_is_refused(server: Running) -> None:
    answer = server.call("POST", PATH, {"model": "scripted", "max_tokens": 50})
    assert answer.status == 400 and "messages" in answer.error["message"] and answer.json["type"] == "error"
    assert refusal(read, messages=[{"role": "tool", "content": "x"}])["param"] == "messages[0].role"


@conforms("llama.cpp", "stop_sequences temperature top_p top_k")
@conforms("vllm anthropic", "serving_chat_should_set_correct_max_tokens system_string_unchanged "
          "serving_chat_could_load_correct_generation_config")  # fmt: skip
def test_how_is_sampled_is_said_in_anthropics_fields() -> None:
    request = read(stop_sequences=["\n", "END"], temperature=0.5, top_p=0.9, top_k=40, system="Be brief.").request
    assert request.limits == Limits(50, ("\n", "END")) and request.messages[0] == Message("system", "Be brief.")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 40)
    assert read(temperature=0).request.sampling.temperature == 0 and read().request.sampling.temperature == 0.7


@conforms(
    "vllm anthropic",
    "absent_thinking_leaves_reasoning_untouched disabled_clears_reasoning_effort "
    "adaptive_pins_nothing_and_keeps_effort_ceiling claude_code_payload anthropic_output_config_instantiation",
)
@pytest.mark.parametrize(
    ("asked", "thinks", "effort"),
    [
        ({}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True, "low"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}}, True, "xhigh"),
        ({"output_config": {}}, False, None),
        ({"output_config": {"effort": "a word of next year"}}, False, None),
    ],
)  # fmt: skip
def test_how_much_is_thought(asked: dict[str, Any], thinks: bool, effort: str | None) -> None:
    parsed = read(**asked)
    assert (parsed.request.thinking, parsed.request.reasoning_effort) == (thinks, effort)
    assert any("effort" in line for line in parsed.taken) == ("a word" in str(asked))


class Remembering(ScriptedSession):
    """Some of the prompt's five tokens were there."""

    reused = 3

    def _events(self, *arguments: Any) -> Iterator[Event]:
        for event in super()._events(*arguments):
            yield replace(event, reused_tokens=self.reused) if isinstance(event, Started) else event


@pytest.mark.parametrize("reused", [0, 3, 5])
@conforms("llama.cpp", "messages_basic")
@conforms(
    "vllm anthropic",
    "simple_messages non_streaming non_streaming_natural_eos_maps_to_end_turn cache_hit "
    "zero_cached_tokens all_tokens_cached "
    "cache_accounting_non_streaming auto_generated_id_has_msg_prefix openai_style_id_is_replaced unique_ids "
    "serialize_messages_response_keeps_nullable_stop_fields non_streaming_stop_token_id_maps_to_end_turn",
)
def test_a_whole_message(serve: Serve, monkeypatch: pytest.MonkeyPatch, reused: int) -> None:
    monkeypatch.setattr(Remembering, "reused", reused)
    server = serve(Remembering())
    first, second = (server.call("POST", PATH, body()).json for _ in range(2))
    convert(first, AssistantMessage)
    assert first["content"] == [text("Hello, world!\n")] and "timings" not in first
    assert first["stop_reason"] == "end_turn" and first["stop_sequence"] is None
    assert first["usage"] == {
        "input_tokens": 5 - reused, "cache_creation_input_tokens": 0, "cache_read_input_tokens": reused,
        "output_tokens": 6,
    }  # fmt: skip
    assert first["id"].startswith("msg_") and first["id"] != second["id"]


def frames(server: Running, **fields: Any) -> list[dict[str, Any]]:
    answer = server.call("POST", PATH, body(stream=True, **fields))
    return [json.loads(frame.partition("data: ")[2]) for frame in answer.body.decode().split("\n\n") if frame]


@conforms(
    "vllm anthropic",
    "anthropic_streaming streaming streaming_no_cache_hit "
    "message_start_contains_message_type_and_role cache_accounting_streaming content_only_stream_unchanged "
    "streaming_no_stop_string_emits_explicit_null_stop_sequence",
)
def test_usage_is_in_the_first_and_the_last_event(serve: Serve) -> None:
    first, *_, last, stop = frames(serve(Remembering()))
    assert first["message"]["usage"]["input_tokens"] == 2 and first["message"]["usage"]["output_tokens"] == 0
    assert (first["message"]["type"], first["message"]["role"]) == ("message", "assistant")
    assert last["usage"] == {**first["message"]["usage"], "output_tokens": 6}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None} and stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("texts", "kinds", "said"),
    [
        pytest.param((f"Sure. {CALL}\nOkay",), ["text", "tool_use", "text"], "Sure.Okay",
                     marks=conforms("vllm anthropic", "tool_use_args_not_dropped_when_content_in_same_chunk "
                                    "tool_call_with_real_leading_text_emits_both_blocks")),
        *(pytest.param((f"{blank}{CALL}",), ["tool_use"], "",
                       marks=conforms("vllm anthropic", "tool_call_survives_whitespace_leading_content"))
          for blank in ("\n", "", "   ", "\n\n")),
        pytest.param(tuple(CALL), ["tool_use"], "",
                     marks=conforms("vllm anthropic", "tool_call_streamed_across_multiple_deltas")),
        pytest.param(("", "real"), ["text"], "real",
                     marks=conforms("vllm anthropic", "empty_content_only_stream_emits_no_text_delta")),
    ],
)  # fmt: skip
def test_blocks_are_opened_filled_and_closed(serve: Serve, texts: tuple[str, ...], kinds: list[str], said: str) -> None:
    """Each in its turn, however the text is cut into steps."""
    events = frames(serve(session(*texts)), tools=[ADD])
    opened: list[str] = []
    spoken, arguments, at = "", "", -1
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert at == -1
            at = event["index"]
            assert at == len(opened)
            opened.append(event["content_block"]["type"])
            if opened[-1] == "tool_use":
                assert event["content_block"]["id"].startswith("toolu_")
            continue
        assert event["index"] == at != -1
        if event["type"] == "content_block_stop":
            at = -1
        else:
            spoken += event["delta"].get("text", "")
            arguments += event["delta"].get("partial_json", "")
    assert at == -1 and opened == kinds and "".join(spoken.split()) == said
    called = "tool_use" in kinds
    assert arguments == ('{"a": 1}' if called else "") and spoken == spoken.strip("\n")
    assert events[-2]["delta"]["stop_reason"] == ("tool_use" if called else "end_turn")


@conforms("vllm anthropic", "has_toolu_prefix unique anthropic_tool_call")
def test_a_call_has_an_id_of_its_own(serve: Serve) -> None:
    server = serve(session(CALL + CALL))
    whole = server.call("POST", PATH, body(tools=[ADD])).json
    first, second = whole["content"]
    assert first["id"] != second["id"] and first["id"].startswith("toolu_") and whole["stop_reason"] == "tool_use"
    again = blocks(first, second, role="assistant")
    server.call("POST", PATH, body(messages=[HI, again, blocks(result("4") | {"tool_use_id": first["id"]})]))


class Failing(ScriptedSession):
    """Breaks behind its first text."""

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        self.faults = [RuntimeError("Internal trouble")]
        return ScriptedSession.generate(self, request, cancelled)


@conforms(
    "vllm anthropic", "converter_forwards_upstream_error_message generic_error_still_returns_internal_server_error"
)
def test_a_fault_is_an_event_of_anthropics(serve: Serve) -> None:
    last = frames(serve(Failing()))[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "Internal trouble" in last["error"]["message"]
    whole = serve(Failing()).call("POST", PATH, body())
    assert whole.status == 500 and whole.json["error"] == last["error"]


@conforms(
    "vllm anthropic",
    "validation_error_returns_bad_request vllm_client_error_returns_bad_request "
    "count_tokens_validation_error_returns_bad_request",
)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_what_the_client_did_wrong_is_a_400(server: Running, path: str) -> None:
    answer = server.call("POST", path, body(stop_sequences=["x"] * 129))
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert "stop_sequences must be a list of 0 to 128" in answer.error["message"]


@conforms("llama.cpp", "vs_openai_different_response_format")
def test_the_dialects_have_their_own_words(server: Running) -> None:
    message, chat = server.call("POST", PATH, body()).json, server.chat().json
    assert "object" not in message and "choices" not in message and message["usage"].keys() & {"input_tokens"}
    assert "type" not in chat and chat["usage"].keys() & {"prompt_tokens"} and chat["object"] == "chat.completion"
