"""Bodies: what becomes a request, and what is a 400 that names the field."""

from __future__ import annotations

import difflib
import http.client
import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from dflash_local.api import request_body
from tests.api.bodies import chat, refusal, text
from tests.api.conftest import LIMIT_S, Running, Serve, body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b'"x"', "object"),
        (b"null", "object"),
        (b'{"model": NaN}', "NaN"),
        (b'{"model": "scripted", "temperature": -Infinity}', "Infinity"),
        (b'{"model": "a", "model": "b"}', "'model'"),
        (b'{"model": "scripted", "messages": [{"role": "user", "role": "user"}]}', "'role'"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b'{"model": "scripted", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"model": 5}', "model"),
        (b"{}", "model"),
    ],
)
def test_a_body_that_is_not_strict_json_is_400(server: Running, data: bytes, says: str) -> None:
    answer = server.call("POST", CHAT, data)
    assert answer.status == 400 and says in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": [1]}, "top_p"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"seed": "1"}, "seed"),
        ({"logprobs": 3}, "logprobs"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"builtins": 1}}, "chat_template_kwargs.builtins"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"mode": "x" * 100_000}, "mode"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"\ud800": 1}, "body"),
    ],
)
def test_a_wrong_type_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert error["param"] == param and param in error["message"] and len(error["message"]) < 600


def test_an_unknown_field_is_taken_with_the_nearest_supported_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    whole = difflib.get_close_matches

    def close(word: str, *arguments: Any, **options: Any) -> list[str]:
        compared.append(len(word))
        return whole(word, *arguments, **options)

    monkeypatch.setattr(difflib, "get_close_matches", close)
    assert chat(temprature=1).taken == ("temprature: not known here; did you mean 'temperature'?",)
    messages = [{"role": "user", "content": "x", "contents": 1}] * 2
    assert chat(messages=messages).taken == ("messages[].contents: not known here; did you mean 'content'?",)
    for field in ("logit_bia", "ignore_eo", "min_toke"):
        assert text(**{field: 1}).taken == (f"{field}: not known here",)
    (line,) = chat(**{"x" * 7_000_000: 1}).taken
    assert line.startswith("x" * 80 + ":")
    assert len(chat(**{f"field_{number}": 1 for number in range(1000)}).taken) == request_body.MAX_NAMED
    assert max(compared) < 20, "its cost is the product of both lengths"


def test_the_connection_stays_usable_after_a_400(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    statuses = []
    for data in (b"{", json.dumps(body()).encode(), b'{"model": NaN}', json.dumps(body()).encode()):
        connection.request("POST", CHAT, data, {"Content-Type": "application/json"})
        used = connection.sock
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
        assert connection.sock is used is not None, "the connection was given up"
    assert statuses == [400, 200, 400, 200]
    connection.close()


@pytest.mark.parametrize(
    ("fields", "maximum"),
    [
        ({"n": 10**60}, "one reply is made"),
        ({"n": 0}, "one reply is made"),
        ({"max_tokens": 10**18}, "from 0 to 1,000,000"),
        ({"max_completion_tokens": 1e18}, "from 0 to 1,000,000"),
        ({"max_tokens": -1}, "from 0 to 1,000,000"),
        ({"logprobs": True, "top_logprobs": 10**6}, "20"),
        ({"seed": 2**64}, str(2**64 - 1)),
        ({"seed": -(2**63) - 1}, "-9223372036854775808.."),
        ({"temperature": 1e300}, "0..5"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"top_k": 10**18}, "2147483648"),
        ({"block_size": 10**9}, "64"),
        ({"stop": ["x"] * 1000}, "128"),
        ({"stop": "x" * 5000}, "1,000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_absurd_numbers_are_400_with_the_maximum(fields: dict[str, Any], maximum: str) -> None:
    assert maximum in refusal(chat, **fields)["message"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "http://evil/x", "", "gpt-4", "a\r\nb", "/etc", "scripted/../x"])
def test_an_unknown_model_is_404_and_names_the_known(server: Running, name: str) -> None:
    for answer in (
        server.call("POST", CHAT, {**body(), "model": name}),
        server.call("POST", TEXT, {"model": name, "prompt": "x"}),
        server.call("POST", "/dflash/v1/load", {"model": name}),
    ):
        assert answer.status == 404 and answer.error["code"] == "model_not_found"
        assert "scripted" in answer.error["message"]


@pytest.mark.parametrize("path", ["a%2f..", "..%2f..%2fetc%2fpasswd", "http:%2f%2fevil", "%00", "x", ""])
def test_an_unknown_model_in_the_path_is_404(server: Running, path: str) -> None:
    answer = server.get(f"/v1/models/{path}")
    assert answer.status == 404 and answer.error["type"] == "not_found_error"


def test_the_served_model_is_found_by_its_names(server: Running) -> None:
    listed = server.get("/v1/models").json
    assert [one["id"] for one in listed["data"]] == ["scripted"] and listed["object"] == "list"
    assert server.get("/v1/models/toy").json == server.get("/v1/models/scripted").json == listed["data"][0]
    assert server.call("POST", CHAT, {**body(), "model": "TOY"}).json["model"] == "scripted"


def test_codex_reads_a_list_of_its_own(server: Running) -> None:
    """Fields without which Codex 0.171 refuses the whole list, and those that tell of the model."""
    server.service.load()
    listed = server.get("/v1/models?client_version=0.171.0").json
    assert listed["data"] == server.get("/v1/models").json["data"] and "models" not in server.get("/v1/models").json
    (only,) = listed["models"]
    assert only["slug"] == only["display_name"] == "scripted" and only["context_window"] == 512
    assert only["truncation_policy"] == {"mode": "tokens", "limit": 64} and only["input_modalities"] == ["text"]
    assert (
        only["base_instructions"] and only["supported_reasoning_levels"] == only["experimental_supported_tools"] == []
    )
    assert only.keys() >= {
        "shell_type",
        "visibility",
        "supported_in_api",
        "priority",
        "support_verbosity",
        "experimental_supported_tools",
    }


def test_codex_is_offered_the_efforts_that_the_template_takes(serve: Serve) -> None:
    server = serve(model=lambda model: replace(model, takes_effort=True))
    (only,) = server.get("/v1/models?client_version=0.171.0").json["models"]
    efforts = [level["effort"] for level in only["supported_reasoning_levels"]]
    assert efforts == ["low", "medium", "high"] and only["default_reasoning_level"] in efforts
    assert only["context_window"] is None, "it is not loaded"


def test_anthropics_clients_read_its_shape(server: Running) -> None:
    server.service.load()
    version = {"anthropic-version": "2023-06-01"}
    listed = server.get("/v1/models", version).json
    (only,) = listed["data"]
    assert listed["first_id"] == listed["last_id"] == only["id"] == "scripted" and listed["has_more"] is False
    assert server.get("/v1/models/toy", version).json == only
    assert only["type"] == "model" and only["max_input_tokens"] == 512
    created = datetime.fromisoformat(only["created_at"].replace("Z", "+00:00")).timestamp()
    assert created == server.endpoint.created


def test_what_no_route_answers_is_an_error_object_too(server: Running) -> None:
    assert server.get("/v1/nothing").error["type"] == "not_found_error"
    assert server.get(CHAT).status == 405
    assert server.call("POST", "/v1/models", {}).status == 405
