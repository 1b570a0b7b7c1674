"""``POST /v1/messages``, Anthropic's: messages of blocks to a ``Request``, and its events to blocks of a message.

The stream's events and their order: https://docs.claude.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dflash_local.api.constraint_fields import checked_schema
from dflash_local.api.refusals import THREAD, FieldError, check_field
from dflash_local.api.reply import Reply
from dflash_local.api.reply_parts import PartReader, ReplyPart, Thought
from dflash_local.api.request_body import (
    CONVERSATION,
    MAX_ITEMS,
    TEXT_ONLY,
    GenerationBody,
    ParsedRequest,
    Refused,
    StopText,
    Texts,
    ToolName,
    forced_tools,
    function_schema,
    parsed_request,
    read_generation,
)
from dflash_local.events import Finished, Started, Step
from dflash_local.request import EFFORTS, MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Effort, Message, ToolCall, read_arguments
from dflash_local.schema import OpenRecord
from dflash_local.service.backend import Model

NOT_HERE: Refused = {
    "stop": ("use stop_sequences", ()),
    "max_completion_tokens": ("use max_tokens", ()),
    "mcp_servers": ("tools are called by the client", ([],)),
    "container": ("tools are called by the client", ()),
    "compaction": ("ask for a summary in a message", ()),
    THREAD: ("nothing is stored: send the whole conversation", ()),
}
# Claude Code begins its system prompt with a line that differs in every request: no prefix of it would be found again.
BILLING_LINE = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
SIGNATURE = "dflash-local"  # of thinking; clients send it back, and nothing here looks at it
BlockType = Annotated[
    Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"],
    Meta(description=TEXT_ONLY),
]


class ResultPart(OpenRecord, frozen=True):
    """A part of what a tool gave: text, or the name of a tool that a search for tools found."""

    type: Annotated[Literal["text", "tool_reference"], Meta(description=TEXT_ONLY)]
    text: str | None = None
    tool_name: ToolName | None = None

    def __post_init__(self) -> None:
        if self.said is None:
            raise ValueError(".text is missing" if self.type == "text" else ".tool_name is missing")

    @property
    def said(self) -> str | None:
        return self.text if self.type == "text" else self.tool_name


class Block(OpenRecord, frozen=True):
    """A part of a message, of whatever type; what its type needs is there."""

    type: BlockType
    text: str | None = None
    thinking: str = ""
    signature: str = ""
    data: str = ""
    id: str = ""
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: str | Annotated[list[ResultPart], Meta(max_length=MAX_ITEMS)] | None = None
    is_error: bool | None = None

    def __post_init__(self) -> None:
        if self.type == "text" and self.text is None:
            raise ValueError(".text is missing")
        if self.type == "tool_use" and not (self.id and self.name):
            raise ValueError(".id and name of the tool are missing")
        if self.type == "tool_result" and not self.tool_use_id:
            raise ValueError(".tool_use_id is missing")


class AnthropicMessage(OpenRecord, frozen=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_ITEMS)]


class AnthropicTool(OpenRecord, frozen=True):
    """A tool; one with a type of its own is run or described by Anthropic's servers."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def of_client(self) -> bool:
        return self.type in (None, "custom")


class ToolChoice(OpenRecord, frozen=True):
    """Whether the model may call tools, or must."""

    type: Literal["auto", "none", "any", "tool"]
    name: ToolName | None = None

    def __post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise ValueError(".name of the tool is missing")


class Thinking(OpenRecord, frozen=True):
    """Whether the model thinks first."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(OpenRecord, frozen=True):
    """The form that a message is asked to have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(OpenRecord, frozen=True):
    """What is asked of the text."""

    format: OutputFormat | None = None
    effort: str | None = None


class MessagesBody(GenerationBody, frozen=True, kw_only=True):
    """The body of a message; sampling fields beyond Anthropic's are taken as well."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES, examples=[CONVERSATION])]
    system: Texts | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


def read(body: bytes, find: Callable[[str], Model]) -> ParsedRequest:
    """Return the request of a body.

    Args:
        find: the model of that name; raises UnknownModelError.

    Raises:
        FieldError: a field is wrong or not supported. UnknownModelError: another model.
    """
    record, sent = read_generation(MessagesBody, body, NOT_HERE)
    model = find(record.model)
    tools, choice = tuple(_tools(record)), record.tool_choice
    asked = "required" if choice is not None and choice.type == "any" else None
    form = record.output_format or (None if record.output_config is None else record.output_config.format)
    return parsed_request(
        msgspec.structs.replace(record, stop=record.stop_sequences),
        sent,
        model,
        schema=None if form is None else checked_schema("output_config.format.schema", form.schema),
        messages=tuple(_conversation(record)),
        reasoning_effort=_effort(record.output_config),
        thinking=record.thinking is not None and record.thinking.type != "disabled",
        tools=tools,
        must_call=forced_tools(asked, choice.name if choice is not None and choice.type == "tool" else None, tools),
        left_out=_left_out(record),
    )


def _effort(config: OutputConfig | None) -> Effort | None:
    """Return OpenAI's word for what is asked for; None for one that nobody here knows."""
    asked = None if config is None else "xhigh" if config.effort == "max" else config.effort
    return next((effort for effort in EFFORTS if effort == asked), None)


def _left_out(record: MessagesBody) -> Iterator[str]:
    """Return lines of what has no effect."""
    for tool in record.tools or ():
        if not tool.of_client:
            yield f"tools: {tool.name} is not the client's own"
    if record.output_config is not None and record.output_config.effort and _effort(record.output_config) is None:
        yield "output_config.effort: that word is not known here"


def _conversation(record: MessagesBody) -> Iterator[Message]:
    """Build the turns."""
    if system := _system(_parts(record.system or "")):
        yield Message("system", system)
    for at, sent in enumerate(record.messages):
        blocks = [Block("text", sent.content)] if isinstance(sent.content, str) else sent.content
        if sent.role == "assistant":
            yield _assistant(blocks, f"messages[{at}]")
            continue
        for block in blocks:
            if block.type == "tool_result":
                given = block.content or ""
                texts = [given] if isinstance(given, str) else [part.said or "" for part in given]
                yield Message("tool", "\n\n".join(texts), tool_call_id=block.tool_use_id)
        texts = [block.text or "" for block in blocks if block.type == "text"]
        said = _system(texts) if sent.role == "system" else "\n\n".join(texts)
        if said or not (sent.role == "system" or any(block.type == "tool_result" for block in blocks)):
            yield Message(sent.role, said)
    if record.messages[-1].role == "assistant":
        raise FieldError("messages", "the last message is the assistant's: a reply is not gone on with", "leave it out")


def _assistant(blocks: list[Block], path: str) -> Message:
    calls = []
    for at, block in enumerate(blocks):
        if block.type == "tool_use":
            check_field(f"{path}.content[{at}].input", block.input)
            calls.append(ToolCall(block.id, block.name or "", json.dumps(block.input or {}, ensure_ascii=False)))
    text = "".join(block.text or "" for block in blocks if block.type == "text")
    return Message("assistant", text, "".join(block.thinking for block in blocks), tuple(calls))


def _system(texts: Sequence[str]) -> str:
    """Return the text of the system's blocks, without the line that changes in every request."""
    return "\n\n".join(text for each in texts if (text := BILLING_LINE.sub("", each)))


def _parts(content: Texts) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _tools(record: MessagesBody) -> Iterator[Mapping[str, Any]]:
    """Return the schemas of the client's tools as chat templates take them."""
    if record.tool_choice is not None and record.tool_choice.type == "none":
        return
    for at, tool in enumerate(record.tools or ()):
        if not tool.of_client:
            continue
        yield function_schema(f"tools[{at}].input_schema", tool.name, tool.description, tool.input_schema)


class MessageReply(Reply):
    """A message of the assistant."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, parsed: ParsedRequest, model: Model, fingerprint: Callable[[], str]) -> None:
        super().__init__(parsed, model, fingerprint)
        self._parts = PartReader(model.call_format, parsed.request.tools, self._tally.notices)
        self._id = f"msg_{secrets.token_hex(16)}"
        self._content: list[dict[str, Any]] = []
        self._open = ""  # the type of the block that is being written
        self._began = False

    def body(self, event: Finished) -> dict[str, Any]:
        """Return the whole message."""
        return {
            **self._message(),
            "content": self._content,
            **self._end(event),
            "usage": self._usage(event.usage.prompt_tokens, event.usage.completion_tokens),
            "metrics": self._tally.metrics(event),
        }

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model.name}

    def _started(self, event: Started) -> Iterator[dict[str, Any]]:
        yield from self._begin(event.prompt_tokens)

    def _begin(self, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """Return the first event, once: a server of another program may not say when a prompt is processed."""
        if not self._began:
            self._began = True
            message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**message, "usage": self._usage(prompt_tokens, 0)}}

    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
        yield from self._begin(0)
        for part in self._parts.feed(event.pieces):
            yield from self._part(part)

    def _last(self, event: Finished) -> Iterator[dict[str, Any]]:
        yield from self._begin(event.usage.prompt_tokens)
        for part in self._parts.finish():
            yield from self._part(part)
        yield from self._closed()
        usage = self._usage(event.usage.prompt_tokens, event.usage.completion_tokens)
        figures = {"metrics": self._tally.metrics(event)}
        yield {"type": "message_delta", "delta": self._end(event), "usage": usage, **figures}
        yield {"type": "message_stop"}

    def _part(self, part: ReplyPart) -> Iterator[dict[str, Any]]:
        if isinstance(part, ToolCall):
            made = part.id.replace("call_", "toolu_", 1) if part.id.startswith("call_") else part.id
            yield from self._opened("tool_use", {"id": made, "name": part.name, "input": {}})
            yield self._delta("input_json_delta", "partial_json", part.arguments)
            self._content[-1]["input"] = read_arguments(part)
            yield from self._closed()
        elif isinstance(part, Thought):
            yield from self._written("thinking", part.text, {"signature": ""})
        else:
            yield from self._written("text", part, {})

    def _written(self, kind: Literal["text", "thinking"], text: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add text to the block that is open, where it is of that type, else to a new one."""
        if not text:
            return
        if self._open != kind:
            yield from self._opened(kind, {kind: "", **more})
        self._content[-1][kind] += text
        yield self._delta(f"{kind}_delta", kind, text)

    def _opened(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._closed()
        self._open = kind
        self._content.append({"type": kind, **fields})
        block = dict(self._content[-1])
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            self._content[-1]["signature"] = SIGNATURE
            yield self._delta("signature_delta", "signature", SIGNATURE)
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": {"type": kind, field: text}}

    def _end(self, event: Finished) -> dict[str, Any]:
        """Return why the message ends."""
        if any(block["type"] == "tool_use" for block in self._content) and event.reason == "stop":
            reason = "tool_use"
        elif event.stop:
            reason = "stop_sequence"
        else:
            reason = "max_tokens" if event.reason == "length" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": event.stop if reason == "stop_sequence" else None}

    def _usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
        """Return the counts; tokens of the prompt that were cached are told beside the others."""
        reused = self._tally.reused
        return {
            "input_tokens": max(prompt_tokens - reused, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": completion_tokens,
        }
