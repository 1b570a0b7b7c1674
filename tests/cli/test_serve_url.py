"""``dflash serve --url``: the endpoint over a vLLM or SGLang server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_local.cli.ps import lines, served
from dflash_local.settings import load as load_settings
from tests.cli.conftest import Cli, Opened, Result
from tests.cli.served import Client
from tests.remote.openai_fake import Fake, running

pytestmark = pytest.mark.usefixtures("opened")

CHAT = "/v1/chat/completions"
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
SUM = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}
Serving = Callable[..., Result]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with running(Fake()) as server:
        yield server


def test_replies_are_passed_on(serving: Serving, opened: Opened, fake: Fake) -> None:
    seen: dict[str, Any] = {}

    def visit(client: Client) -> None:
        seen["chat"] = client.call(CHAT, {**ASKED, "seed": 3, "temperature": 0.5, "return_token_ids": True})
        seen["text"] = client.call("/v1/completions", {"model": "demo", "prompt": "hi"})
        seen["models"] = client.call("/v1/models")
        seen["status"] = client.call("/dflash/v1/status")
        seen["ps"] = lines(served(load_settings()), 200)[1]
        seen["metrics"] = client.text("/metrics")

    result = serving(visit, "demo", "--url", fake.url)
    assert result.code == 0 and not opened.sessions, result.err
    status, chat = seen["chat"]
    assert status == 200 and chat["choices"][0]["message"]["content"] == "Hello, world!\n", chat
    assert chat["usage"]["completion_tokens"] == 8 and chat["choices"][0]["token_ids"] == list(range(10, 18))
    assert "127.0.0.1" not in chat["system_fingerprint"] and chat["system_fingerprint"].endswith("-vllm")
    assert chat["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": pytest.approx(7 / 3),
        "draft_acceptance_rate": pytest.approx(4 / 21),
        "acceptance_per_position": [1.0, pytest.approx(1 / 3), *[0.0] * 5],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 21,
        "num_spec_tokens": 7,
    }
    assert "verify_ms" not in chat["metrics"]["dflash"] and chat["metrics"]["dflash"]["block_size"] == 8
    counted = ("generation_tokens_total", "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    for name, value in zip(counted, (16, 6, 8)):
        assert f'vllm:{name}{{engine="0",model_name="demo"}} {value}.0\n' in seen["metrics"]
    assert '_per_pos_total{engine="0",model_name="demo",position="1"} 2.0\n' in seen["metrics"]
    assert "prefix_cache" not in seen["metrics"], "the server does not report it"
    assert seen["text"][1]["choices"][0]["text"] == "Hello, world!\n"
    assert [(one["id"], one["max_model_len"]) for one in seen["models"][1]["data"]] == [("demo", 1024)]
    assert seen["status"][1]["facts"]["program"] == "vllm" and seen["status"][1]["models"] == ["demo"]
    path, sent = fake.bodies[0]
    assert path == CHAT and (sent["seed"], sent["temperature"]) == (3, 0.5)
    assert f"replies come from vLLM 0.32.0 at {fake.url}, 7 drafts a cycle" in result.err
    assert "loaded:" not in result.err
    assert f"vLLM 0.32.0 at {fake.url}, 7 drafts a cycle" in seen["ps"] and "1,024" in seen["ps"]


def test_calls_of_tools_that_the_server_found_are_calls(
    serving: Serving, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[dict[str, Any]]] = [
        [{"index": 0, "id": "call_1", "function": {"name": "sum", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a": "1; {'}}],
        [{"index": 0, "function": {"arguments": '"}'}}],
        [{"index": 1, "id": "call_2", "function": {"name": "sum", "arguments": "{}"}}],
    ]
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"tool_calls": call}}]} for call in calls]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    monkeypatch.setattr(fake, "chunks", lambda _path, _body: iter(chunks))
    seen: list[tuple[int, Any]] = []
    serving(lambda client: seen.append(client.call(CHAT, {**ASKED, "tools": [SUM]})), "demo", "--url", fake.url)
    choice = seen[0][1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [("sum", {"a": "1; {"}), ("sum", {})]
    assert fake.bodies[0][1]["tools"] == [SUM]


def test_a_request_that_the_server_cannot_do_is_refused_and_a_dead_one_is_named(serving: Serving, fake: Fake) -> None:
    seen: list[tuple[int, Any]] = []

    def visit(client: Client) -> None:
        seen.append(client.call(CHAT, {**ASKED, "logprobs": True}))
        seen.append(client.call(CHAT, {**ASKED, "model": "other"}))
        for fault in ("500", "dies", ""):
            fake.fault = fault
            seen.append(client.call(CHAT, ASKED))
        seen.append(client.call("/dflash/v1/load", {"model": "other"}))
        seen.append(client.call("/health"))
        seen.append(client.call("/dflash/v1/unload", {}))

    result = serving(visit, "demo", "--url", fake.url)
    assert [status for status, _ in seen] == [400, 404, 502, 502, 200, 404, 200, 400] and result.code == 0
    assert "without drafts only" in seen[0][1]["error"]["message"]
    assert "broke off in the middle" in seen[3][1]["error"]["message"]
    assert seen[7][1]["error"]["message"].startswith(f"the server at {fake.url} keeps demo loaded")


def test_another_model_of_the_server_takes_its_place(serving: Serving, fake: Fake) -> None:
    fake.model = "house-model"
    seen: list[Any] = []

    def visit(client: Client) -> None:  # no MODEL was given: the server's only one
        seen.append(client.call(CHAT, {**ASKED, "model": "house-model"}))
        fake.model = "next-model"
        seen.append(client.call("/dflash/v1/load", {"model": "next-model"}))
        seen.append(client.call(CHAT, {**ASKED, "model": "next-model"}))

    assert serving(visit, "--url", fake.url).code == 0
    assert [status for status, _ in seen] == [200, 200, 200] and fake.bodies[-1][1]["model"] == "next-model"


def test_what_a_server_does_not_tell_is_left_out(serving: Serving) -> None:
    seen: list[Any] = []

    def visit(client: Client) -> None:
        seen.append(client.call(CHAT, {**ASKED, "return_token_ids": True}))
        seen.append(client.call(CHAT, ASKED))
        silent.usage = False
        seen.append(client.call(CHAT, ASKED))
        seen.append(client.call("/v1/models")[1]["data"][0]["max_model_len"])
        seen.append(client.text("/metrics"))

    with running(Fake("sglang", "0.5.23", context=None)) as silent:
        assert serving(visit, "demo", "--url", silent.url).code == 0
    refused, told, untold = (answer for _, answer in seen[:3])
    assert seen[0][0] == 400 and "names no tokens" in refused["error"]["message"]
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert told["metrics"]["speculative_decoding"] is None, "its gauge is of no single request"
    assert "of the server, its /metrics count no drafts of single requests" in told["metrics"]["dflash"]["notices"][0]
    assert untold["usage"] is None and untold["metrics"]["tokens_per_second"] is None and seen[3] is None
    assert "spec_decode" not in seen[4] and 'generation_tokens_total{engine="0",model_name="demo"} 8.0\n' in seen[4]


def test_a_server_that_hangs_holds_up_no_status(serving: Serving, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_local.app.model_sources.NAMES_S", 0.2)
    seen: list[Any] = []

    def visit(client: Client) -> None:
        client.call(CHAT, ASKED)
        fake.fault = "mute"
        seen.append(served(load_settings()))
        seen.append(client.call("/dflash/v1/status")[1]["models"])
        fake.fault = ""

    assert serving(visit, "demo", "--url", fake.url).code == 0
    assert seen[0][0]["state"] == "ready" and seen[1] == []


def test_thoughts_come_apart_and_a_stream_is_one(serving: Serving, fake: Fake) -> None:
    fake.thinking = "first a word"
    seen: list[Any] = []

    def visit(client: Client) -> None:
        asked = {**ASKED, "chat_template_kwargs": {"enable_thinking": True}}
        seen.append(client.call(CHAT, asked)[1]["choices"][0]["message"])
        seen.append(client.text(CHAT, {**asked, "stream": True}))

    assert serving(visit, "demo", "--url", fake.url).code == 0
    assert (seen[0]["reasoning_content"], seen[0]["content"]) == ("first a word", "Hello, world!\n")
    assert fake.bodies[0][1]["chat_template_kwargs"] == {"enable_thinking": True}
    chunks = [json.loads(line[6:]) for line in seen[1].splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world!\n" and len(deltas) > 4
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "first a word"
    assert seen[1].rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("demo", "--url", "nowhere"), 2, "is not the address of a server"),
        (("demo", "--url", "URL", "--engine", "sglang"), 7, "not SGLang"),
        (("qwen3-8b", "--url", "URL"), 3, "serves demo, not Qwen/Qwen3-8B"),
        (("demo", "--url", "URL", "--exact"), 2, "decides that when it is started"),
        (("demo", "--url", "URL", "--mode", "ar"), 2, "decides that when it is started"),
        (("demo", "--url", "URL", "--keep-alive", "30m"), 2, "keeps its model loaded"),
        (("demo", "--url", "URL", "--engine-args", "-x"), 2, "for a server that is launched"),
        (("demo", "--engine", "vllm"), 1, "vLLM is not on PATH"),
        (("demo", "--url", "http://127.0.0.1:1"), 7, "no server answers"),
    ],
)
def test_a_server_that_is_not_as_named_ends_it(
    cli: Cli, fake: Fake, argv: tuple[str, ...], code: int, words: str
) -> None:
    result = cli("serve", *(fake.url if word == "URL" else word for word in argv), "--port", "0")
    assert result.code == code and words in result.err and "Traceback" not in result.err
