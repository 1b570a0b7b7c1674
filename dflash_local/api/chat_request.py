"""The body of ``POST /v1/chat/completions`` to a ``Request``; what cannot be done is an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from dflash_local.api import request_fields
from dflash_local.api.fields import MAX_ITEMS, Fields, naming, quoted
from dflash_local.api.refusals import FieldError, unsupported
from dflash_local.chat.tool_prompt import in_format
from dflash_local.request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    ROLES,
    Effort,
    Message,
    ToolCall,
    check_json,
    read_arguments,
)
from dflash_local.service.resident import Model

NOT_CONSTRAINED = "the model is told, its reply is not constrained"
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# field -> (why, values that ask for nothing)
NOT_HERE: dict[str, tuple[str, tuple[object, ...]]] = {
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none",)),
    "audio": ("replies are text", ()),
    "modalities": ("replies are text", (["text"],)),
    "web_search_options": ("leave it out", ()),
    "verbosity": ("leave it out", ()),
    "chat_template": ("the model's own is used", ()),
    "add_generation_prompt": ("a reply is always begun", (True,)),
    "continue_final_message": ("apply the template and use /v1/completions", (False,)),
    "echo": ("the reply alone is sent", (False,)),
}


def read(body: bytes, find: Callable[[str], Model]) -> request_fields.ParsedRequest:
    """See ``request_fields.read``."""
    return request_fields.read(body, find, _own, NOT_HERE)


def _own(fields: Fields, model: Model) -> dict[str, Any]:
    messages = _messages(fields.items("messages", MAX_MESSAGES))
    return {
        "messages": messages if (schema := _response_format(fields)) is None else in_format(messages, schema),
        "thinking": _thinking(fields, model),
        "tools": _tools(fields),
        "reasoning_effort": cast(Effort | None, fields.text("reasoning_effort")),
        "logprobs": _logprobs(fields),
    }


def _messages(value: list[Any] | None) -> tuple[Message, ...]:
    if not value:
        raise FieldError("messages", "messages is missing or empty", "send at least one message")
    return tuple(_message(Fields(item, f"messages[{index}]")) for index, item in enumerate(value))


def _message(fields: Fields) -> Message:
    role = fields.needed_text("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise fields.wrong("role", f"{quoted(role)} is not known", f"use one of {', '.join(ROLES)}")
    content = _content(fields)
    calls = _calls(fields) if role == "assistant" else ()
    answered = fields.text("tool_call_id") or ""
    if role == "tool" and not answered:
        raise fields.wrong("tool_call_id", "is missing")
    if content is None and not calls:
        raise fields.wrong("content", "is missing")
    thinking, reasoning = fields.text("reasoning_content"), fields.text("reasoning")
    name = fields.text("name") or ""
    for field in ("refusal", "audio", "function_call", "annotations"):  # clients send a reply back as it came
        fields.refuse(field, "leave it out", ([], ""))
    fields.finish()
    return Message(role, content or "", thinking or reasoning or "", calls, answered, name)


def _content(fields: Fields) -> str | None:
    """Text, or text parts put together; None when there is none."""
    value = fields.take("content")
    if value is None or isinstance(value, str):
        return value
    path = fields.name("content")
    if not isinstance(value, list):
        raise fields.wrong("content", f"must be text or a list of parts, got {quoted(value)}")
    if len(value) > MAX_ITEMS:
        raise fields.wrong("content", f"has {len(value)} parts, {MAX_ITEMS} allowed", "send fewer")
    texts = []
    for index, item in enumerate(value):
        part = Fields(item, f"{path}[{index}]")
        kind = part.needed_text("type")
        if kind != "text":
            raise unsupported(part.name("type"), f"{quoted(kind)} parts are not read, only text is")
        texts.append(part.needed_text("text"))
        part.finish()
    return "".join(texts)


def _calls(fields: Fields) -> tuple[ToolCall, ...]:
    calls = []
    for index, item in enumerate(fields.items("tool_calls") or ()):
        call = Fields(item, f"{fields.name('tool_calls')}[{index}]")
        _only_function(call)
        call.take("index")
        function = Fields(call.take("function"), call.name("function"))
        made = ToolCall(call.needed_text("id"), _name(function), function.needed_text("arguments"))
        with naming(function.name("arguments")):
            read_arguments(made)
        calls.append(made)
        function.finish()
        call.finish()
    return tuple(calls)


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """The functions offered, as their schemas came; none when ``tool_choice`` says so."""
    value = fields.items("tools", MAX_TOOLS)
    tools = tuple(_tool(fields, item, f"tools[{index}]") for index, item in enumerate(value or ()))
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise FieldError(
            "tool_choice",
            f"unsupported: tool_choice {quoted(choice)}",
            "the model decides: use auto or none",
            "unsupported_parameter",
        )
    return () if choice == "none" else tools


def _tool(fields: Fields, item: Any, path: str) -> Mapping[str, Any]:
    """The function as the model is told of it: without ``strict``, which templates would write into the prompt."""
    tool = Fields(item, path)
    _only_function(tool)
    function = Fields(tool.take("function"), tool.name("function"))
    _name(function)
    function.text("description")
    with naming(function.name("parameters")):
        check_json(function.name("parameters"), function.mapping("parameters"))
    if function.flag("strict"):
        fields.taken["tools[].function.strict"] = NOT_CONSTRAINED
    function.finish()
    tool.finish()
    return {**item, "function": {key: value for key, value in item["function"].items() if key != "strict"}}


def _only_function(fields: Fields) -> None:
    kind = fields.needed_text("type")
    if kind != "function":
        raise unsupported(fields.name("type"), f"{quoted(kind)} is not known, only function is")


def _name(function: Fields) -> str:
    name = function.needed_text("name")
    if not TOOL_NAME.fullmatch(name):
        raise FieldError(
            function.name("name"), f"{quoted(name)} is not a tool's name", "letters, digits, _ . - and 128 at most"
        )
    return name


def _thinking(fields: Fields, model: Model) -> bool:
    """The one template argument that may be set; else as the drafter was trained."""
    value = fields.take("chat_template_kwargs")
    if value is None:
        return model.thinking
    arguments = Fields(value, "chat_template_kwargs")
    thinking = arguments.flag("enable_thinking")
    arguments.finish()
    return model.thinking if thinking is None else thinking


def _logprobs(fields: Fields) -> int | None:
    wanted = bool(fields.flag("logprobs"))
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise FieldError("top_logprobs", "top_logprobs without logprobs", "set logprobs to true")
    return (top or 0) if wanted else None


def _response_format(fields: Fields) -> Mapping[str, Any] | None:
    """The schema of the JSON that is asked for, an empty one for any object; None for text."""
    value = fields.take("response_format")
    if value is None:
        return None
    form = Fields(value, "response_format")
    kind = form.needed_text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported("response_format", f"{quoted(kind)} is not known: use text, json_object or json_schema")
    schema: Mapping[str, Any] = {}
    if kind == "json_schema":
        named = Fields(form.take("json_schema"), form.name("json_schema"))
        named.needed_text("name")
        named.text("description")
        schema = named.mapping("schema") or {}
        with naming(named.name("schema")):
            check_json(named.name("schema"), schema)
        if named.flag("strict"):
            fields.taken[named.name("strict")] = NOT_CONSTRAINED
        named.finish()
    form.finish()
    return None if kind == "text" else schema
