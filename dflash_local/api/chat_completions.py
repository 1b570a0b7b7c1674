"""``POST /v1/chat/completions``: messages to a ``Request``, and its events to content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from dflash_local.api.constraint_fields import ResponseFormat, format_schema
from dflash_local.api.openai_reply import OpenAIReply, finite
from dflash_local.api.refusals import FieldError, check_field, naming
from dflash_local.api.reply_parts import PartReader, ReplyPart, Thought
from dflash_local.api.request_body import (
    CONVERSATION,
    MAX_ITEMS,
    GenerationBody,
    ParsedRequest,
    Refused,
    TemplateArguments,
    Texts,
    ToolName,
    forced_tools,
    parsed_request,
    read_generation,
)
from dflash_local.events import Finished, Step, TokenLogprob
from dflash_local.request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Effort,
    Message,
    ToolCall,
    read_arguments,
)
from dflash_local.schema import OpenRecord, keys_of
from dflash_local.service.backend import Model

NOT_HERE: Refused = {
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none",)),
    "audio": ("replies are text", ()),
    "modalities": ("replies are text", (["text"],)),
    "web_search_options": ("leave it out", ()),
    "chat_template": ("the model's own is used", ()),
    "add_generation_prompt": ("a reply is always begun", (True,)),
    "continue_final_message": ("apply the template and use /v1/completions", (False,)),
    "echo": ("the reply alone is sent", (False,)),
}
Nothing = Annotated[Literal[""], Meta(description="left out")] | None


class CallBody(OpenRecord, frozen=True):
    """A call of a tool in a message of the assistant."""

    class CalledFunction(OpenRecord, frozen=True):
        """Its name and the JSON text of its arguments."""

        name: ToolName
        arguments: str

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class MessageBody(OpenRecord, frozen=True):
    """A message; clients send one of the assistant back as it came, with fields that are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Texts | None = None
    tool_calls: Annotated[list[CallBody], Meta(max_length=MAX_ITEMS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: Nothing = None
    function_call: Nothing = None

    def __post_init__(self) -> None:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError(".tool_call_id is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(".tool_calls are the assistant's")
        if self.content is None and self.role != "assistant":  # of whom a turn may be a thought or a call alone
            raise ValueError(".content is missing")


class ToolBody(OpenRecord, frozen=True):
    """A function that the model may call."""

    class OfferedFunction(OpenRecord, frozen=True):
        """What the model is told of it."""

        name: ToolName
        description: str | None = None
        parameters: dict[str, Any] | None = None

    type: Literal["function"]
    function: OfferedFunction


class NamedFunction(OpenRecord, frozen=True):
    """The tool that must be called."""

    class Name(OpenRecord, frozen=True):
        """Its name."""

        name: ToolName

    type: Literal["function"]
    function: Name


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """The body of a chat completion."""

    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MAX_MESSAGES, examples=[CONVERSATION])]
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateArguments | None = None


def read(body: bytes, find: Callable[[str], Model]) -> ParsedRequest:
    """Return the request of a body.

    Args:
        find: the model of that name; raises UnknownModelError.

    Raises:
        FieldError: a field is wrong or not supported. UnknownModelError: another model.
    """
    record, sent = read_generation(ChatBody, body, NOT_HERE)
    model = find(record.model)
    messages = tuple(_message(one, f"messages[{at}]") for at, one in enumerate(record.messages))
    if record.top_logprobs and not record.logprobs:
        raise FieldError("top_logprobs", "top_logprobs without logprobs", "set logprobs to true")
    tools = _tools(record, sent["tools"]) if record.tools else ()
    choice = record.tool_choice
    forced, named = (None, choice.function.name) if isinstance(choice, NamedFunction) else (choice, None)
    asked = record.chat_template_kwargs and record.chat_template_kwargs.enable_thinking
    return parsed_request(
        record,
        sent,
        model,
        schema=format_schema(record.response_format),
        messages=messages,
        thinking=model.thinking if asked is None else asked,
        tools=tools,
        must_call=forced_tools(forced, named, tools),
        reasoning_effort=record.reasoning_effort,
        logprobs=record.top_logprobs or 0 if record.logprobs else None,
    )


def _message(sent: MessageBody, path: str) -> Message:
    content = sent.content if isinstance(sent.content, str) else "".join(part.text for part in sent.content or ())
    calls = tuple(ToolCall(one.id, one.function.name, one.function.arguments) for one in sent.tool_calls or ())
    for at, call in enumerate(calls):
        with naming(f"{path}.tool_calls[{at}].function.arguments"):
            read_arguments(call)
    thinking = sent.reasoning_content or sent.reasoning or ""
    role = "system" if sent.role == "developer" else sent.role
    return Message(role, content, thinking, calls, sent.tool_call_id or "", sent.name or "")


def _tools(record: ChatBody, sent: list[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas as they came, but for what is not declared, which templates would write into the prompt."""
    offered = []
    for at, (tool, raw) in enumerate(zip(record.tools or (), sent, strict=True)):
        path = f"tools[{at}].function.parameters"
        check_field(path, tool.function.parameters)
        function = _declared(raw["function"], ToolBody.OfferedFunction)
        offered.append({**_declared(raw, ToolBody), "function": function})
    return () if record.tool_choice == "none" else tuple(offered)


def _declared(sent: Mapping[str, Any], kind: type) -> dict[str, Any]:
    known = keys_of(kind)
    return {key: value for key, value in sent.items() if key in known}


class ChatReply(OpenAIReply):
    """A chat completion."""

    kind = "chat.completion"
    id_prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"
    nothing = {"delta": {}}
    prompt_ids_in_choice = False

    def __init__(self, parsed: ParsedRequest, model: Model, fingerprint: Callable[[], str]) -> None:
        super().__init__(parsed, model, fingerprint)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._parts = PartReader(model.call_format, parsed.request.tools, self._tally.notices)

    def begin(self) -> Iterator[dict[str, Any]]:
        """Return the chunk with the role."""
        yield self._delta({"role": "assistant", "content": ""})

    def _said(self, event: Step) -> Iterator[dict[str, Any]]:
        yield from map(self._part, self._parts.feed(event.pieces))

    def _held(self) -> Iterator[dict[str, Any]]:
        yield from map(self._part, self._parts.finish())

    def _whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls and not content else content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [_call(call) for call in self._calls]
        return {"message": message, "logprobs": None if self._parsed.request.logprobs is None else {"content": []}}

    def _as_logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return {"content": [_token(token) for token in tokens]}

    def _reason(self, event: Finished) -> str:
        return "tool_calls" if self._calls and event.reason == "stop" else event.reason

    def _part(self, part: ReplyPart) -> dict[str, Any]:
        if isinstance(part, Thought):
            self._reasoning.append(part.text)
            return self._delta({"reasoning_content": part.text})
        if isinstance(part, ToolCall):
            self._calls.append(part)
            return self._delta({"tool_calls": [{"index": len(self._calls) - 1, **_call(part)}]})
        self._content.append(part)
        return self._delta({"content": part})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk({"delta": delta})


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": finite(value), "bytes": data} for _, text, value, data in token.top]
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": token.bytes, "top_logprobs": top}
