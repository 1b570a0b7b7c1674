"""Tools in the words of the prompt, for chat templates that have no place for them.

The form is that of Hermes and Qwen: schemas in the system message, calls as JSON in ``<tool_call>``, results as
``<tool_response>`` in a user message. All of it is plain text to the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from dflash_local.chat.tool_formats import CLOSE, OPEN
from dflash_local.errors import UsageError
from dflash_local.request import Message, ToolCall

SHARE = 2  # of the context one part in so many may go to tools: the rest is for the conversation and the reply
_CALL_FORMAT = "For each function call, return a json object with function name and arguments within "
_PROMPT = f"""\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

{_CALL_FORMAT}{OPEN}{CLOSE} XML tags:
{OPEN}
{{"name": <function-name>, "arguments": <args-json-object>}}
{CLOSE}"""


_FORMAT = "Answer with one JSON object and nothing around it"


def in_format(messages: Sequence[Message], schema: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the conversation, its last message of the user asking for JSON by ``schema``; an empty one: any object.

    Not in the system message, which some templates refuse.
    """
    asked = f"{_FORMAT}, by this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}" if schema else f"{_FORMAT}."
    at = next((index for index in reversed(range(len(messages))) if messages[index].role == "user"), None)
    if at is None:
        return (*messages, Message("user", asked))
    return (*messages[:at], _joined(messages[at], messages[at].content, asked), *messages[at + 1 :])


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt that describes its tools to a model, empty without any; UsageError: one nests too deep."""
    if not tools:
        return ""
    try:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    except RecursionError as error:
        raise UsageError("the schemas of the tools are nested too deep", "make them flatter") from error
    return _PROMPT % schemas


def as_text(messages: Sequence[Message], function_of: Callable[[ToolCall], Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return the conversation without the ``tool`` role and without calls apart from the text.

    Args:
        function_of: the name and the arguments of a call; raises UsageError where they are no JSON object.
    """
    written: list[Message] = []
    for answers, group in groupby(messages, key=lambda message: message.role == "tool"):
        if answers:  # one message for all that stand together: roles may have to take turns
            results = [f"<tool_response>\n{message.content}\n</tool_response>" for message in group]
            written.append(Message("user", "\n".join(results)))
        else:
            written += [_calls_as_text(message, function_of) for message in group]
    return tuple(written)


def _calls_as_text(message: Message, function_of: Callable[[ToolCall], Mapping[str, Any]]) -> Message:
    if not message.tool_calls:
        return message
    calls = [json.dumps(function_of(call), ensure_ascii=False) for call in message.tool_calls]
    parts = [message.content, *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]
    return replace(message, content="\n".join(filter(None, parts)), tool_calls=())


def with_prompt(messages: Sequence[Message], prompt: str) -> tuple[Sequence[Message], ...]:
    """Return the conversation with ``prompt`` in it, in each way that a template may take it, the best one first.

    That is at the end of the system message and, for templates that refuse or drop one, before the first message of
    the user.
    """
    return (in_system(messages, prompt), _in_user(messages, prompt)) if prompt else (messages,)


def has_prompt(text: str) -> bool:
    """Return True where a rendering kept the prompt."""
    return _CALL_FORMAT in text


def in_system(messages: Sequence[Message], prompt: str) -> tuple[Message, ...]:
    """Return the conversation with ``prompt`` at the end of its system message, which is made where there is none."""
    if messages and messages[0].role == "system":
        return (_joined(messages[0], messages[0].content, prompt), *messages[1:])
    return (Message("system", prompt), *messages)


def _in_user(messages: Sequence[Message], prompt: str) -> tuple[Message, ...]:
    at = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if at is None:
        return (Message("user", prompt), *messages)
    return (*messages[:at], _joined(messages[at], prompt, messages[at].content), *messages[at + 1 :])


def _joined(message: Message, *parts: str) -> Message:
    return replace(message, content="\n\n".join(filter(None, parts)))
