"""The anthropic client does a task with one tool: by hand, and by its own loop, whole and streamed."""

from __future__ import annotations

import sys
from functools import partial

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from checks import KEY, MODEL, report
from pydantic import TypeAdapter
from tasks import NAME, PARAMETERS, TASK, outcome, run

client = anthropic.Anthropic(base_url=sys.argv[1], api_key=KEY, max_retries=0, timeout=120)
MOST = 3000  # tokens of a reply
THINKING = {"type": "enabled", "budget_tokens": 1024}
ASKED = [{"role": "user", "content": TASK}]


@anthropic.beta_tool(name=NAME)
def shell(command: str, description: str = "") -> str:
    """Run a command.

    Args:
        command: of the shell. description: what it is for.
    """
    return run(command)


def result(call: anthropic.types.ToolUseBlock) -> dict[str, object]:
    said = [{"type": "text", "text": run(call.input["command"])}]
    return {"type": "tool_result", "tool_use_id": call.id, "content": said}


def messages(stream: bool) -> tuple[int, str, str]:
    turns, calls = list(ASKED), 0
    tools = [{"name": NAME, "input_schema": PARAMETERS}]
    asked = {"model": MODEL, "max_tokens": MOST, "tools": tools, "thinking": THINKING}
    while True:
        if stream:
            with client.messages.stream(**asked, messages=turns) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked, messages=turns)
        turns.append({"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in message.content]})
        made = [part for part in message.content if part.type == "tool_use"]
        if not made:
            return outcome(calls, message.content[-1].text)
        calls += len(made)
        turns.append({"role": "user", "content": [result(call) for call in made]})


def own_loop(stream: bool) -> tuple[int, str, str]:
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=MOST, tools=[shell], messages=list(ASKED), stream=stream
    )
    replies = [one.get_final_message() if stream else one for one in runner]
    return outcome(sum(one.stop_reason == "tool_use" for one in replies), replies[-1].content[-1].text)


def types() -> int:
    """How many replies and events are what the library's own types say, to the last field."""
    tools = [{"name": NAME, "input_schema": PARAMETERS}]
    asked = {"model": MODEL, "max_tokens": MOST, "tools": tools, "thinking": THINKING, "messages": ASKED}
    found = [(RawMessageStreamEvent, one) for one in client.messages.create(**asked, stream=True)]
    found.append((Message, client.messages.create(**asked)))
    for kind, one in found:
        TypeAdapter(kind).validate_python(one.to_dict())
    return len(found)


report(
    types=types,
    messages=partial(messages, False),
    messages_streamed=partial(messages, True),
    own_loop=partial(own_loop, False),
    own_loop_streamed=partial(own_loop, True),
)
