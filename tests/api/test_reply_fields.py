"""What a reply holds besides its text: reasoning, tool calls, log probabilities, token ids, notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_local.events import Event, FinishReason, Notice, Piece, Step, TokenLogprob
from dflash_local.remote.logprobs import rows_of
from dflash_local.request import Request
from tests.api.conftest import TOOL, Serve, body
from tests.service.scripted import PROMPT_IDS, ScriptedSession


class Noticing(ScriptedSession):
    """Has something to say before it begins."""

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        yield Notice("something to know", "warning")
        yield from ScriptedSession.generate(self, request, cancelled)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_notices_are_in_the_metrics_and_the_log(serve: Serve, path: str, lines: list[str]) -> None:
    server = serve(Noticing())
    data = {"model": "scripted", "prompt": "x"} if "chat" not in path else body()
    assert server.call("POST", path, data).json["metrics"]["dflash"]["notices"] == ["something to know"]
    last = server.call("POST", path, {**data, "stream": True}).events[-2]
    assert last["metrics"]["dflash"]["notices"] == ["something to know"]
    assert last["metrics"]["dflash"]["plain_step_ms"] == pytest.approx(1000 / 60)
    assert sum(line.endswith("warning something to know") for line in lines) == 2


def test_without_drafts_there_is_no_acceptance(serve: Serve) -> None:
    server = serve(ScriptedSession(steps=[Step((Piece("x"),), (1,), 0, 0, 1, 0.1)]))
    assert server.chat(mode="ar").json["metrics"]["speculative_decoding"] is None


def test_thinking_is_reasoning_content(serve: Serve) -> None:
    steps = (Step((Piece("hm", "thinking"), Piece("yes", "final")), (1, 2), 3, 1, 4, 0.1),)
    server = serve(ScriptedSession(steps=steps), model=lambda model: replace(model, thinking=True))
    message = server.chat().json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    deltas = [event["choices"][0]["delta"] for event in server.chat(stream=True).events[:-1]]
    assert {"reasoning_content": "hm"} in deltas and {"content": "yes"} in deltas


@pytest.mark.parametrize(("end", "reason"), [("stop", "tool_calls"), ("length", "length")])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_come_whole(serve: Serve, stream: bool, end: FinishReason, reason: str) -> None:
    parts = ["Sure.\n<tool", '_call>\n{"name": "add", "argu', 'ments": {"a": 1}}\n</tool_call>']
    session = ScriptedSession(steps=[Step((Piece(part),), (1,), 0, 0, 0, 0.1) for part in parts], end=end)
    answer = serve(session).chat(stream=stream, tools=[TOOL])
    assert session.requests[0].tools == (TOOL,)
    if stream:
        choices = [event["choices"][0] for event in answer.events[:-1]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert answer.text == "Sure." and choices[-1]["finish_reason"] == reason and calls[0].pop("index") == 0
    else:
        choice = answer.json["choices"][0]
        assert choice["message"]["content"] == "Sure." and choice["finish_reason"] == reason
        calls = choice["message"]["tool_calls"]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'} and calls[0]["type"] == "function"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_an_unfinished_call_is_text_and_noticed(serve: Serve, path: str) -> None:
    text = '<tool_call>{"name": "add", "argu'
    server = serve(ScriptedSession(steps=[Step((Piece(text),), (1,), 0, 0, 0, 0.1)]))
    data: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "tools": [TOOL]}
    if path == "/v1/messages":
        data["tools"] = [{"name": "add", "input_schema": {"type": "object"}}]
    elif path == "/v1/responses":
        data = {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]}
    answer = server.call("POST", path, data | {"model": "scripted"})
    assert text in str(answer.json)
    (notice,) = answer.json["metrics"]["dflash"]["notices"]
    assert notice == "broken or unfinished tool calls, given as text: 1"


def test_tool_markup_is_text_when_no_tools_were_offered(serve: Serve) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    answer = serve(ScriptedSession(steps=[Step((Piece(text),), (1,), 0, 0, 0, 0.1)])).chat()
    assert answer.json["choices"][0]["message"]["content"] == text


def test_log_probabilities_in_both_forms(serve: Serve) -> None:
    top = ((1, "H\\xc3", -0.5, (72, 0xC3)), (2, "\\x80", float("-inf"), (0x80,)))
    found = (
        TokenLogprob(1, "H\\xc3", -0.5, top, (72, 0xC3)),
        TokenLogprob(2, "\\xa9", -1.0, (), (0xA9,)),
        TokenLogprob(3, "!", -2.0, (), (33,)),
    )
    server = serve(ScriptedSession(steps=[Step((Piece("Hé!"),), (1, 2, 3), 0, 0, 0, 0.1, found)]))
    content = server.chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "Hé!" and content[1]["token"] == "\\xa9"
    assert content[0]["top_logprobs"][1] == {"token": "\\x80", "logprob": -9999.0, "bytes": [0x80]}
    streamed = [event["choices"][0]["logprobs"] for event in server.chat(logprobs=True, stream=True).events[:-1]]
    assert [one["token"] for part in streamed if part for one in part["content"]] == ["H\\xc3", "\\xa9", "!"]
    data = {"model": "scripted", "prompt": "x", "logprobs": 2}
    columns = server.call("POST", "/v1/completions", data).json["choices"][0]["logprobs"]
    assert columns["tokens"] == ["H\\xc3", "\\xa9", "!"] and columns["text_offset"] == [0, 1, 2]
    assert columns["token_logprobs"] == [-0.5, -1.0, -2.0]


def test_the_sampled_token_is_among_the_top_log_probabilities_of_a_completion(serve: Serve) -> None:
    """As OpenAI and vLLM have it: up to ``logprobs`` + 1 of them, with 0 the sampled one alone."""
    other = ((5, "a", -0.1, None), (6, "\ufffd", -2.0, None))
    found = (
        TokenLogprob(1, "b", -3.0, other),
        TokenLogprob(5, "a", -0.1, other),
        TokenLogprob(7, "\ufffd", -4.0, other),
    )
    bare = tuple(replace(one, top=()) for one in found)
    for tokens, tops in (
        (found, [{"b": -3.0, "a": -0.1, "\ufffd": -2.0}, {"a": -0.1, "\ufffd": -2.0}, {"\ufffd": -4.0, "a": -0.1}]),
        (bare, [{"b": -3.0}, {"a": -0.1}, {"\ufffd": -4.0}]),
    ):
        server = serve(ScriptedSession(steps=[Step((Piece("x"),), (1, 5, 7), 0, 0, 0, 0.1, tokens)]))
        data = {"model": "scripted", "prompt": "x", "logprobs": len(tokens[0].top)}
        assert server.call("POST", "/v1/completions", data).json["choices"][0]["logprobs"]["top_logprobs"] == tops


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_likeliest_tokens_are_named_by_id_as_vllm_has_them(serve: Serve, path: str) -> None:
    """Two of one text keep apart, and another ``dflash`` reads them."""
    top = ((7, "a", -0.5, (97,)), (8, "a", -1.5, (97,)), (9, "\\x80", -3.0, (0x80,)))
    tokens = (TokenLogprob(7, "a", -0.5, top, (97,)), TokenLogprob(8, "a", -1.5, top, (97,)))
    server = serve(ScriptedSession(steps=[Step((Piece("aa"),), (7, 8), 0, 0, 0, 0.1, tokens)]))
    shown = {"prompt": "x", "logprobs": 3} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 3}
    data = {**body(), **shown, "return_tokens_as_token_ids": True}
    data = {key: value for key, value in data.items() if key != "messages" or "chat" in path}
    rows = rows_of(server.call("POST", path, data).json["choices"][0])
    assert [(row.token_id, row.logprob) for row in rows] == [(7, -0.5), (8, -1.5)]
    assert [[(number, value) for number, _, value, _ in row.top] for row in rows] == [
        [(7, -0.5), (8, -1.5), (9, -3.0)]
    ] * 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_are_returned_as_vllm_has_them(serve: Serve, path: str) -> None:
    session = ScriptedSession()
    server = serve(session)
    data = {**body(), "return_token_ids": True}
    if path == "/v1/completions":
        data = {"model": "scripted", "prompt": [5, 6, 7], "return_token_ids": True}
    whole = server.call("POST", path, data).json
    choice = whole["choices"][0]
    assert choice["token_ids"] == [10, 11, 12, 13, 14, 15]
    assert (whole if "chat" in path else choice)["prompt_token_ids"] == list(PROMPT_IDS)
    chunks = server.call("POST", path, {**data, "stream": True}).events[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [one for choice in choices for one in choice.get("token_ids", ())] == [10, 11, 12, 13, 14, 15]
    prompts = [one["prompt_token_ids"] for one in (chunks if "chat" in path else choices) if "prompt_token_ids" in one]
    assert prompts == [list(PROMPT_IDS)]
    assert session.requests[0].return_token_ids
    plain = server.call("POST", path, {**data, "return_token_ids": False})
    assert b"token_ids" not in plain.body
