"""The openai client against a real server, scripted and with the demo pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any, Literal

import pytest

from dflash_local.catalog.bundled import find
from dflash_local.events import Piece, Step
from dflash_local.service.backend import Backend as Session
from dflash_local.service.backend import Model
from tests.api.conftest import TOOL, Running, Serve
from tests.service.scripted import ScriptedSession

openai = pytest.importorskip("openai")
from pydantic import BaseModel  # noqa: E402  # it comes with openai

QUESTION = [{"role": "user", "content": "Write a Python function that returns the sum of a list of numbers."}]


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def connect(server: Running, token: str = "none") -> Any:
        made.append(
            openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=token, max_retries=0, timeout=60)
        )
        return made[-1]

    yield connect
    for one in made:
        one.close()


def test_the_openai_client_reads_everything(client: Callable[..., Any], server: Running) -> None:
    api = client(server)
    assert [model.id for model in api.models.list()] == ["scripted"]
    assert api.models.retrieve("scripted").owned_by == "dflash-local"
    whole = api.chat.completions.create(model="scripted", messages=QUESTION, temperature=0, seed=1, user="me")
    assert whole.choices[0].message.content == "Hello, world!\n" and whole.usage.total_tokens == 11
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    stream = api.chat.completions.create(
        model="scripted", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world!\n"
    assert chunks[-1].usage.completion_tokens == 6
    text = api.completions.create(model="scripted", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in text) == "Hello, world!\n"


def test_errors_are_the_clients_own(client: Callable[..., Any], server: Running, guarded: Running) -> None:
    api = client(server)
    with pytest.raises(openai.NotFoundError, match="scripted"):
        api.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="scripted", messages=QUESTION, n=3)
    assert caught.value.param == "n" and caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.AuthenticationError):
        client(guarded).models.list()
    assert client(guarded, "correct-horse-battery").models.list().data


def test_an_error_in_a_stream_is_raised(client: Callable[..., Any], serve: Serve) -> None:
    api = client(serve(ScriptedSession(faults=[RuntimeError("dead")])))
    with pytest.raises(openai.APIError, match="dead"):
        list(api.chat.completions.create(model="scripted", messages=QUESTION, stream=True))


def test_a_tool_round_with_the_client(client: Callable[..., Any], serve: Serve) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    session = ScriptedSession(steps=[Step((Piece(call),), (1,), 0, 0, 0, 0.1)])
    api = client(serve(session))
    first = api.chat.completions.create(model="scripted", messages=QUESTION, tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls[0].function.arguments == '{"a": 2}'
    answered = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    api.chat.completions.create(model="scripted", messages=[*QUESTION, message, answered], tools=[TOOL])
    sent = session.requests[1].messages
    assert sent[1].tool_calls[0].name == "add" and sent[2].tool_call_id == message.tool_calls[0].id
    with api.chat.completions.stream(model="scripted", messages=QUESTION, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "add"


class Level(int, Enum):
    """As pydantic writes it: behind a ``$ref``, with an ``enum``."""

    LOW = 1
    HIGH = 2


class Place(BaseModel):
    """Behind a ``$ref`` as well."""

    name: str
    zip: int | None


class Forecast(BaseModel):
    """All that a schema of openai-python's says in its own way."""

    place: Place
    level: Level
    days: int | None
    kind: Literal["short"]
    scale: Literal[1, 2]
    either: Place | list[int] | None
    wet: bool
    share: float


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_pydantic_is_called_with_what_it_takes(
    client: Callable[..., Any], serve: Serve, stream: bool, lines: list[str]
) -> None:
    given = {
        "place": '{"name": "Ulm", "zip": null}', "level": "2", "days": "null", "kind": "short", "scale": "1",
        "either": "[1, 2]", "wet": "true", "share": "0.5",
    }  # fmt: skip
    inner = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in given.items())
    call = f"<tool_call>\n<function=Forecast>\n{inner}</function>\n</tool_call>"
    session = ScriptedSession(steps=[Step((Piece(call),), (1,), 0, 0, 0, 0.1)])
    api = client(serve(session, model=lambda model: replace(model, call_format="xml")))
    asked = {
        "model": "scripted", "messages": QUESTION, "tools": [openai.pydantic_function_tool(Forecast)],
        "parallel_tool_calls": False, "seed": -1, "reasoning_effort": "low",
    }  # fmt: skip
    if stream:
        with api.chat.completions.stream(**asked) as events:
            reply = events.get_final_completion()
    else:
        reply = api.chat.completions.parse(**asked)
    (made,) = reply.choices[0].message.tool_calls
    assert made.function.parsed_arguments == Forecast(
        place=Place(name="Ulm", zip=None), level=Level.HIGH, days=None, kind="short", scale=1, either=[1, 2], wet=True,
        share=0.5,
    )  # fmt: skip
    (request,) = session.requests
    assert request.sampling.seed == 2**64 - 1 and request.reasoning_effort == "low"
    assert "strict" not in request.tools[0]["function"], "the template would write it into the prompt"
    assert all(any(field in line for line in lines) for field in ("parallel_tool_calls", "tools[].function.strict"))


def test_a_reply_of_pydantic_is_parsed(client: Callable[..., Any], serve: Serve) -> None:
    session = ScriptedSession(steps=[Step((Piece('{"name": "Ulm", "zip": 5}'),), (1,), 0, 0, 0, 0.1)])
    api = client(serve(session))
    reply = api.chat.completions.parse(model="scripted", messages=QUESTION, response_format=Place)
    assert reply.choices[0].message.parsed == Place(name="Ulm", zip=5)
    assert '"zip"' in session.requests[0].messages[0].content, "the model is told the schema"


@pytest.mark.needs_torch
def test_the_demo_pair_end_to_end(client: Callable[..., Any], serve: Serve) -> None:
    def load(_progress: object) -> Session:
        from dflash_local.engine.load_pair import load as load_pair
        from dflash_local.load_config import LoadConfig

        return load_pair(find("demo"), LoadConfig(device="cpu"))

    server = serve(model=lambda _scripted: Model("demo", load))
    api = client(server)
    asked = {"model": "demo", "messages": QUESTION, "max_tokens": 48}
    drafted = api.chat.completions.create(**asked)
    plain = api.chat.completions.create(**asked, extra_body={"mode": "ar", "return_token_ids": True})
    assert len(plain.model_extra["prompt_token_ids"]) == plain.usage.prompt_tokens
    assert len(plain.choices[0].model_extra["token_ids"]) == plain.usage.completion_tokens
    stream = api.chat.completions.create(**asked, stream=True, logprobs=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = drafted.choices[0].message.content
    assert text and text == plain.choices[0].message.content
    assert text == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    tokens = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert len(tokens) == drafted.usage.completion_tokens == chunks[-1].usage.completion_tokens
    acceptance = drafted.model_extra["metrics"]["speculative_decoding"]
    assert acceptance["mean_acceptance_length"] > 1.5
    assert sum(acceptance["acceptance_histogram"]) == acceptance["num_spec_steps"]
    assert plain.model_extra["metrics"]["speculative_decoding"] is None
    later = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    again = api.chat.completions.create(**{**asked, "messages": later})
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    # Its template takes no tools: they are told in words, and left out where they would fill the context.
    told = api.chat.completions.create(**asked, tools=[TOOL])
    assert told.usage.prompt_tokens > drafted.usage.prompt_tokens + 100
    assert told.model_extra["metrics"]["dflash"]["notices"] == []
    chunks = list(api.chat.completions.create(**asked, tools=[TOOL] * 40, stream=True))
    assert text == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    (notice,) = chunks[-1].model_extra["metrics"]["dflash"]["notices"]
    assert "tools were left out" in notice
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": "word " * 5000}]})
    assert caught.value.code == "context_length_exceeded"
