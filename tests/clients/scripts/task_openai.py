"""The openai client does a task with one tool, in each of its APIs, whole and streamed."""

from __future__ import annotations

import json
from functools import partial

import openai
from checks import KEY, MODEL, report, url
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tasks import NAME, PARAMETERS, TASK, outcome, run

client = openai.OpenAI(base_url=url(), api_key=KEY, max_retries=0, timeout=120)


def chat(stream: bool) -> tuple[int, str, str]:
    messages, calls = [{"role": "user", "content": TASK}], 0
    tools = [{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}]
    while True:
        if stream:
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return outcome(calls, message.content)
        for call in message.tool_calls:
            calls += 1
            said = run(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def responses(stream: bool) -> tuple[int, str, str]:
    items, calls = [{"role": "user", "content": TASK}], 0
    tools = [{"type": "function", "name": NAME, "parameters": PARAMETERS, "strict": False}]
    while True:
        if stream:
            with client.responses.stream(model=MODEL, input=items, tools=tools) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(model=MODEL, input=items, tools=tools)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        made = [item for item in response.output if item.type == "function_call"]
        if not made:
            return outcome(calls, response.output_text)
        for call in made:
            calls += 1
            said = run(json.loads(call.arguments)["command"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})


def types() -> int:
    """How many replies and events are what the library's own types say, to the last field."""
    chat_tools = [{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": TASK}], "tools": chat_tools}
    tools = [{"type": "function", "name": NAME, "parameters": PARAMETERS}]
    item = {"model": MODEL, "input": TASK, "tools": tools, "reasoning": {"effort": "low"}}
    found = [
        *((ChatCompletionChunk, one) for one in client.chat.completions.create(**asked, stream=True)),
        *((ResponseStreamEvent, one) for one in client.responses.create(**item, stream=True)),
        (ChatCompletion, client.chat.completions.create(**asked)),
        (Response, client.responses.create(**item)),
    ]
    for kind, one in found:
        TypeAdapter(kind).validate_python(one.to_dict())
    return len(found)


report(
    types=types,
    chat=partial(chat, False),
    chat_streamed=partial(chat, True),
    responses=partial(responses, False),
    responses_streamed=partial(responses, True),
)
