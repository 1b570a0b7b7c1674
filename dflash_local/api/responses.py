"""``POST /v1/responses``, OpenAI's: items to a ``Request``, and its events to items of a response.

Nothing is stored: clients send the whole history each time, as Codex does. The stream's events and their order:
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dflash_local.api.constraint_fields import checked_schema
from dflash_local.api.refusals import FieldError, check_field, naming
from dflash_local.api.reply import Reply
from dflash_local.api.reply_parts import PartReader, ReplyPart, Thought
from dflash_local.api.request_body import (
    MAX_ITEMS,
    QUESTION,
    TEXT_ONLY,
    Count,
    GenerationBody,
    ParsedRequest,
    Refused,
    TemplateArguments,
    ToolName,
    forced_tools,
    function_schema,
    parsed_request,
    read_generation,
)
from dflash_local.events import Finished, Step
from dflash_local.request import MAX_MESSAGES, MAX_TOOLS, Effort, Message, ToolCall, read_arguments
from dflash_local.schema import OpenRecord
from dflash_local.service.backend import Model

NOT_HERE: Refused = {
    "previous_response_id": ("nothing is stored: send the whole history", ()),
    "conversation": ("nothing is stored: send the whole history", ()),
    "prompt": ("send instructions and input", ()),
    "background": ("leave it out", (False,)),
    "truncation": ("shorten the input", ("disabled",)),
    "max_tokens": ("use max_output_tokens", ()),
    "max_completion_tokens": ("use max_output_tokens", ()),
}
OFFERED_TYPES = ("function", "custom", "namespace")
# What is so in every response: fields of OpenAI's that ask for nothing here.
SAME = {
    "store": False,
    "background": False,
    "truncation": "disabled",
    "service_tier": "default",
    "top_logprobs": 0,
    "max_tool_calls": None,
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
}
FREE_FORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
PartType = Annotated[
    Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"],
    Meta(description=TEXT_ONLY),
]


class InputText(OpenRecord, frozen=True):
    """A part of an item's content."""

    type: PartType
    text: str


Texts = str | Annotated[list[InputText], Meta(max_length=MAX_ITEMS)]


class InputItem(OpenRecord, frozen=True):
    """A turn, a thought, a call or what a call gave, of whatever type; clients send back what they got."""

    type: Literal[
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Texts | None = None
    summary: Annotated[list[InputText], Meta(max_length=MAX_ITEMS)] | None = None
    call_id: str = ""
    namespace: str | None = None
    name: str | None = None
    arguments: str = ""
    input: str = ""
    output: Texts | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None

    def __post_init__(self) -> None:
        if self.type == "message" and (self.role is None or self.content is None):
            raise ValueError(f".{'role' if self.role is None else 'content'} is missing")
        if self.type.endswith(("_call", "_output")) and not self.call_id:
            raise ValueError(".call_id is missing")
        if self.type.endswith("_call") and not self.name:
            raise ValueError(".name is missing")


class ResponsesTool(OpenRecord, frozen=True):
    """A function, a tool that takes free text, or a group of such in a namespace; of other types none is offered."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponsesTool] | None = None


class NamedTool(OpenRecord, frozen=True):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: ToolName


class Reasoning(OpenRecord, frozen=True):
    """How much the model thinks."""

    effort: Effort | None = None


class TextFormat(OpenRecord, frozen=True):
    """The form that a reply is asked to have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None


class TextOptions(OpenRecord, frozen=True):
    """What is asked of the text."""

    format: TextFormat | None = None


class ResponsesBody(GenerationBody, frozen=True, kw_only=True):
    """The body of a response."""

    input: Annotated[
        str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)], Meta(examples=[QUESTION])
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    chat_template_kwargs: TemplateArguments | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call, and where it stands in the body."""

    tool: ResponsesTool
    namespace: str | None
    path: str

    @property
    def free_form(self) -> bool:
        return self.tool.type == "custom"


def read(body: bytes, find: Callable[[str], Model]) -> ParsedRequest:
    """Return the request of a body.

    Args:
        find: the model of that name; raises UnknownModelError.

    Raises:
        FieldError: a field is wrong or not supported. UnknownModelError: another model.
    """
    record, sent = read_generation(ResponsesBody, body, NOT_HERE)
    model = find(record.model)
    form = record.text.format if record.text is not None else None
    schema = None
    if form is not None and form.type != "text":
        schema = checked_schema("text.format.schema", form.schema)
    effort = record.reasoning.effort if record.reasoning is not None else None
    tools = tuple(_schema(name, offered) for name, offered in _offered(record).items())
    choice = record.tool_choice
    forced, named = (None, choice.name) if isinstance(choice, NamedTool) else (choice, None)
    asked = record.chat_template_kwargs and record.chat_template_kwargs.enable_thinking
    thinking = model.thinking if effort is None else effort != "none"
    kinds = dict.fromkeys(tool.type for tool in record.tools or () if tool.type not in OFFERED_TYPES)
    return parsed_request(
        msgspec.structs.replace(record, max_tokens=record.max_output_tokens),
        sent,
        model,
        schema=schema,
        messages=tuple(_conversation(record)),
        thinking=thinking if asked is None else asked,
        tools=tools,
        must_call=forced_tools(forced, named, tools),
        left_out=(f"tools: {kind} is not run here" for kind in kinds),
        reasoning_effort=effort,
    )


def _offered(record: ResponsesBody) -> dict[str, OfferedTool]:
    """Return the tools by the names that the model has for them, which hold the namespace."""
    found: dict[str, OfferedTool] = {}

    def offer(tools: list[ResponsesTool], namespace: str | None, path: str) -> None:
        for at, tool in enumerate(tools):
            here = f"{path}[{at}]"
            if tool.type == "namespace" and namespace is None:
                offer(tool.tools or [], tool.name, f"{here}.tools")
            elif tool.type in ("function", "custom"):
                if tool.name is None:
                    raise FieldError(f"{here}.name", f"{here}.name is missing")
                found[_full_name(namespace, tool.name)] = OfferedTool(tool, namespace, here)

    if record.tool_choice != "none":
        offer(record.tools or [], None, "tools")
    return found


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _schema(name: str, offered: OfferedTool) -> Mapping[str, Any]:
    """Return a tool as chat templates take it: free text is one text, and its grammar stands in the description."""
    tool, path = offered.tool, f"{offered.path}.parameters"
    if not offered.free_form:
        return function_schema(path, name, tool.description, tool.parameters)
    check_field(path, tool.parameters)
    grammar, description = (tool.format or {}).get("definition"), tool.description
    if isinstance(grammar, str):
        description = f"{description or ''}\n\nThe input is free text by this grammar:\n{grammar}".strip()
    return function_schema(path, name, description, FREE_FORM)


def _conversation(record: ResponsesBody) -> tuple[Message, ...]:
    """Build the turns."""
    items = [InputItem(role="user", content=record.input)] if isinstance(record.input, str) else record.input
    turns = [Message("system", record.instructions)] if record.instructions else []
    said: list[InputItem] = []  # of the assistant, one after the other

    def answered() -> None:
        if said:
            turns.append(_assistant(said))
            said.clear()

    for at, item in enumerate(items):
        if item.type in ("reasoning", "function_call", "custom_tool_call") or item.role == "assistant":
            if item.type == "function_call":
                with naming(f"input[{at}].arguments"):
                    read_arguments(ToolCall(item.call_id, item.name or "", item.arguments))
            said.append(item)
            continue
        answered()
        if item.type.endswith("_output"):
            turns.append(Message("tool", _text(item.output), tool_call_id=item.call_id))
        else:
            turns.append(Message("user" if item.role == "user" else "system", _text(item.content)))
    if said and said[-1].type == "message":
        raise FieldError("input", "the last item is the assistant's: a reply is not gone on with", "leave it out")
    answered()
    return tuple(turns)


def _assistant(items: list[InputItem]) -> Message:
    calls = []
    for item in items:
        if item.type in ("function_call", "custom_tool_call"):
            name = _full_name(item.namespace, item.name or "")
            free = json.dumps({"input": item.input}, ensure_ascii=False)
            calls.append(ToolCall(item.call_id, name, item.arguments if item.type == "function_call" else free))
    text = "".join(_text(item.content) for item in items if item.type == "message")
    thoughts = [_text(item.content) or _text(item.summary) for item in items if item.type == "reasoning"]
    return Message("assistant", text, "\n\n".join(thoughts), tuple(calls))


def _text(content: Texts | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class ResponseReply(Reply):
    """A response."""

    def __init__(self, parsed: ParsedRequest, model: Model, fingerprint: Callable[[], str]) -> None:
        super().__init__(parsed, model, fingerprint)
        record, sampling = parsed.record, parsed.request.sampling
        assert isinstance(record, ResponsesBody)
        self._offered = _offered(record)
        self._parts = PartReader(model.call_format, parsed.request.tools, self._tally.notices)
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._output: list[dict[str, Any]] = []
        self._open = ""  # the type of the item that is being written
        self._number = 0  # of the next event
        self._asked = {
            "instructions": record.instructions,
            "max_output_tokens": record.max_output_tokens,
            "tool_choice": msgspec.to_builtins(record.tool_choice or "auto"),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "tools": [{**tool, "strict": False} for tool in msgspec.to_builtins(record.tools or [])],
            "reasoning": {"effort": parsed.request.reasoning_effort, "summary": None},
            "text": {"format": _format(record)},
        }

    def error(self, told: dict[str, Any]) -> bytes:
        """Return how a stream ends in an error."""
        error = told["error"]
        failure = {"code": error["code"] or "server_error", "message": error["message"]}
        return self.frame(self._event("response.failed", response={**self._response("failed"), "error": failure}))

    def begin(self) -> Iterator[dict[str, Any]]:
        """Return the events before those of items."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def body(self, event: Finished) -> dict[str, Any]:
        """Return the whole response."""
        ended = event.reason != "length"
        return {
            **self._response("completed" if ended else "incomplete"),
            "completed_at": int(time.time()) if ended else None,
            "incomplete_details": None if ended else {"reason": "max_output_tokens"},
            "usage": self._usage(event),
            "metrics": self._tally.metrics(event),
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "model": self._model.name,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            **SAME,
            **self._asked,
            "usage": None,
        }

    def _usage(self, event: Finished) -> dict[str, Any]:
        prompt, completion = event.usage.prompt_tokens, event.usage.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._tally.reused, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": event.usage.thinking_tokens},
            "total_tokens": prompt + completion,
        }

    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
        for part in self._parts.feed(event.pieces):
            yield from self._part(part)

    def _last(self, event: Finished) -> Iterator[dict[str, Any]]:
        for part in self._parts.finish():
            yield from self._part(part)
        yield from self._closed("incomplete" if event.reason == "length" else "completed")
        whole = self.body(event)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _part(self, part: ReplyPart) -> Iterator[dict[str, Any]]:
        if isinstance(part, ToolCall):
            yield from self._called(part)
        elif isinstance(part, Thought):
            yield from self._written("reasoning", part.text)
        else:
            yield from self._written("message", part)

    def _written(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[dict[str, Any]]:
        """Add text to the item that is open, where it is of that type, else to a new one."""
        if not text:
            return
        is_text = kind == "message"
        if self._open != kind:
            more: dict[str, Any] = {"role": "assistant"} if is_text else {"summary": []}
            yield from self._opened(kind, "msg" if is_text else "rs", {**more, "content": []})
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if is_text:
                part = {"type": "output_text", "text": "", "annotations": [], **_no_logprobs(True)}
            yield self._of_item("response.content_part.added", content_index=0, part=part)
            self._output[-1]["content"].append(dict(part))
        content = self._output[-1]["content"][0]
        content["text"] += text
        yield self._of_item(f"response.{content['type']}.delta", content_index=0, delta=text, **_no_logprobs(is_text))

    def _called(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        """Write an item of a call, whole: calls come so."""
        offered = self._offered.get(call.name)
        name, namespace = (call.name, None) if offered is None else (offered.tool.name, offered.namespace)
        free_form = offered is not None and offered.free_form
        field, prefix = ("input", "ctc") if free_form else ("arguments", "fc")
        text = str(read_arguments(call).get("input", call.arguments)) if free_form else call.arguments
        more = {"call_id": call.id, "name": name, field: "", **({} if namespace is None else {"namespace": namespace})}
        yield from self._opened("custom_tool_call" if free_form else "function_call", prefix, more)
        self._output[-1][field] = text
        kind = "response.custom_tool_call_input" if free_form else "response.function_call_arguments"
        yield self._of_item(f"{kind}.delta", delta=text)
        yield self._of_item(f"{kind}.done", **{field: text})
        yield from self._closed()

    def _opened(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._closed()
        self._open = kind
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=copy.deepcopy(item))

    def _closed(self, status: Literal["completed", "incomplete"] = "completed") -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        item = self._output[-1]
        for content in item.get("content", ()):
            done = {"text": content["text"], **_no_logprobs(content["type"] == "output_text")}
            yield self._of_item(f"response.{content['type']}.done", content_index=0, **done)
            yield self._of_item("response.content_part.done", content_index=0, part=content)
        item["status"] = status
        self._open = ""
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _format(record: ResponsesBody) -> dict[str, Any]:
    """Return the form that was asked for, as a response tells it."""
    form = (record.text and record.text.format) or TextFormat("text")
    told = {key: value for key, value in msgspec.to_builtins(form).items() if value is not None}
    return told if form.type != "json_schema" else {"description": None, **told, "strict": True}


def _no_logprobs(is_text: bool) -> dict[str, Any]:
    return {"logprobs": []} if is_text else {}
