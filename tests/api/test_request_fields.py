"""Fields of a body: what is honoured, what is refused by name, what is ignored openly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_local.api import chat_completions
from dflash_local.request import Limits, Message, SamplingParams, ToolCall
from tests.api.bodies import DEFAULTS, MODEL, chat, refusal, text
from tests.api.conftest import TOOL, Running, body

UNSUPPORTED: list[tuple[str, Any]] = [
    ("n", 2),
    ("n", True),
    ("logit_bias", {"5": 1}),
    ("best_of", 2),
    ("response_format", {"type": "grammar"}),
    ("functions", [{}]),
    ("function_call", "auto"),
    ("tool_choice", "required"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("modalities", ["audio"]),
    ("audio", {}),
    ("min_tokens", 5),
    ("ignore_eos", True),
    ("stop_token_ids", [5]),
    ("chat_template_kwargs", {"thinking": True}),
    ("echo", True),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=lambda value: str(value)[:30])
def test_what_is_not_supported_says_so(name: str, value: Any) -> None:
    error = refusal(chat, **{name: value})
    assert error["param"].startswith(name) and name in error["message"]


@pytest.mark.parametrize("turn", [{"role": "user"}, {"role": "tool", "tool_call_id": "c1"}], ids=["user", "tool"])
def test_a_picture_beside_text_is_refused_as_in_every_dialect(turn: dict[str, str]) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = refusal(chat, messages=[{**turn, "content": [{"type": "text", "text": "Look:"}, picture]}])
    assert error["param"] == "messages[0].content[1].type"
    assert "must be text: the model reads no pictures, sound or files, got 'image_url'" in error["message"]


def test_what_asks_for_nothing_is_fine() -> None:
    harmless = {
        "n": 1,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "echo": False,
        "modalities": ["text"],
        "temperature": None,
        "stop": None,
        "seed": None,
        "tools": None,
        "max_tokens": None,
        "stream_options": None,
        "user": None,
    }
    assert chat(**harmless).request == chat().request
    assert chat(tools=[TOOL], tool_choice="none").request.tools == ()
    assert chat(logprobs=False, top_logprobs=0).request == chat().request
    assert refusal(chat, top_logprobs=1)["param"] == "top_logprobs"


def test_what_changes_no_text_is_taken_and_named(server: Running, lines: list[str]) -> None:
    """Once in the log, in the notices of each reply, and without what stood in it; the template is not shown it."""
    cached = {"cache_control": {"type": "SECRET"}}
    marked = {**TOOL, **cached, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    said = [{"role": "user", "content": [{"type": "text", "text": "hi", **cached}], "annotations": ["SECRET"]}]
    asked = {"type": "text", "strict": "SECRET"}
    fields: dict[str, Any] = {
        "store": False,
        "metadata": {"a": "SECRET"},
        "context_management": {"SECRET": 1},
        "user": None,
    }
    parsed = chat(messages=said, tools=[marked], response_format=asked, **fields)
    assert parsed.request == chat(tools=[TOOL]).request
    named = (
        "messages[].content[].cache_control", "messages[].annotations", "tools[].cache_control",
        "tools[].function.strict", "response_format.strict", "store", "metadata", "context_management",
    )  # fmt: skip
    assert {line.partition(": ")[0] for line in parsed.taken} == set(named)
    assert len(lines) == len(named) and not any("SECRET" in line for line in lines)
    notices = server.chat(messages=said, tools=[marked], **fields).json["metrics"]["dflash"]["notices"]
    assert "taken without effect: metadata: not kept" in notices and len(notices) == len(named) - 1
    assert sum("metadata" in line for line in lines) == 1


def test_a_json_format_is_told_to_the_model() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "Place", "strict": True, "schema": schema}}
    (message,) = chat(response_format=asked).request.messages
    assert message.role == "user" and message.content.startswith("hi\n\n") and json.dumps(schema) in message.content
    (message,) = chat(response_format={"type": "json_object"}).request.messages
    assert message.content == "hi\n\nAnswer with one JSON object and nothing around it."
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first, second = chat(messages=turns, response_format=asked).request.messages
    assert json.dumps(schema) in first.content and second.content == "b"
    assert refusal(chat, response_format={"type": "json_schema"})["param"] == "response_format.json_schema"


@pytest.mark.parametrize(("seed", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (7, 7)])
def test_a_negative_seed_is_the_unsigned_number_of_its_bits(server: Running, seed: int, used: int) -> None:
    answer = server.chat(seed=seed)
    assert answer.json["metrics"]["dflash"]["seed"] == used
    assert chat(seed=seed).request.sampling == replace(DEFAULTS, seed=used)


def test_reasoning_effort_is_a_word_that_clients_know() -> None:
    assert chat(reasoning_effort="low").request.reasoning_effort == "low"
    assert "reasoning_effort" in refusal(chat, reasoning_effort="<|end|>")["message"]


def test_what_is_supported_is_honoured() -> None:
    parsed = chat(
        temperature=0.3,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        stop=["a", "b"],
        max_completion_tokens=9,
        mode="ar",
        block_size=4,
        logprobs=True,
        top_logprobs=3,
        tools=[TOOL],
        stream=True,
        chat_template_kwargs={"enable_thinking": True},
        stream_options={"include_usage": True},
    )
    request = parsed.request
    assert request.sampling == SamplingParams(0.3, 7, 0.5, 0.1, 1.1, 1, -1, 2**64 - 1)
    assert request.limits == Limits(9, ("a", "b"))
    assert (request.mode, request.block_size, request.thinking, request.logprobs) == ("ar", 4, True, 3)
    assert request.tools == (TOOL,) and parsed.stream and parsed.include_usage


def test_absent_fields_take_the_models_own_sampling_as_in_vllm() -> None:
    assert chat().request.sampling == DEFAULTS
    assert chat(temperature=0).request.sampling == replace(DEFAULTS, temperature=0)
    assert chat(top_k=-1).request.sampling.top_k == 0
    assert chat().request.limits.max_new_tokens == 1_000_000  # the context ends it before


def test_messages_as_clients_send_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    empty: dict[str, Any] = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    parsed = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", **empty},
            {"role": "tool", "tool_call_id": "c1", "content": "3", "name": "add"},
            {"role": "assistant", "content": "3", "reasoning": "so"},
            {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "a thought alone"},
        ]
    )
    assert parsed.request.messages == (
        Message("system", "be brief"),
        Message("user", "one two"),
        Message("assistant", "", "hm", (ToolCall("c1", "add", '{"a": 1}'),)),
        Message("tool", "3", tool_call_id="c1", name="add"),
        Message("assistant", "3", "so"),
        Message("assistant", "", "a thought alone"),
    )


def test_completion_prompts() -> None:
    assert text().request.prompt == "hi" and text().request.limits.max_new_tokens == 16
    assert text(prompt=["hi"]).request.prompt == "hi"
    assert text(prompt=[1, 2]).request.prompt_ids == text(prompt=[[1, 2]]).request.prompt_ids == (1, 2)
    assert text(logprobs=0).request.logprobs == 0
    wrong: tuple[Any, ...] = ("", [], ["a", "b"], [[1], [2]], [1, "a"], [-1], [True], None, 5, {})
    for prompt in wrong:
        assert refusal(text, prompt=prompt)["param"] == "prompt"
    for field, value in (("echo", True), ("suffix", "x"), ("best_of", 3), ("n", 2)):
        assert refusal(text, **{field: value})["param"] == field


def test_a_model_without_its_drafter_answers_in_mode_ar() -> None:
    plain = replace(MODEL, mode="ar")
    assert chat_completions.read(json.dumps(body()).encode(), lambda _name: plain).request.mode == "ar"
