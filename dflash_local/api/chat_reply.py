"""Events to the chunks and the body of a chat completion: content, reasoning, tool calls, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from dflash_local.api.figures import finite
from dflash_local.api.reply import Reply
from dflash_local.api.request_fields import ParsedRequest
from dflash_local.chat.tool_calls import CallFormat, CallParser, Part, call_parser
from dflash_local.events import Channel, Finished, Step, TokenLogprob
from dflash_local.request import ToolCall


class ChatReply(Reply):
    """A chat completion by a model that writes tool calls in this ``form``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    nothing = {"delta": {}}
    prompt_ids_in_choice = False

    def __init__(self, parsed: ParsedRequest, head: Callable[[], dict[str, Any]], form: CallFormat) -> None:
        super().__init__(parsed, head)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._form = form
        self._parser: CallParser | None = None
        self._parser_channel: Channel = "final"  # the channel that the parser reads

    def begin(self) -> Iterator[dict[str, Any]]:
        """The chunk with the role."""
        yield self._delta({"role": "assistant", "content": ""})

    def _step(self, event: Step) -> Iterator[dict[str, Any]]:
        for channel, pieces in groupby(event.pieces, key=lambda piece: piece.channel):
            yield from self._text(channel, "".join(piece.text for piece in pieces))

    def _held(self) -> Iterator[dict[str, Any]]:
        yield from self._parts(self._parser.finish() if self._parser else [])

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

    def _text(self, channel: Channel, text: str) -> Iterator[dict[str, Any]]:
        if channel == "thinking":
            self._reasoning.append(text)
            yield self._delta({"reasoning_content": text})
            return
        if not self._reads(channel):
            yield from self._parts([text])
            return
        if self._parser is not None and self._parser_channel != channel:
            yield from self._parts(self._parser.finish())
            self._parser = None
        if self._parser is None:
            self._parser = call_parser(self._form, self._parsed.request.tools)
            self._parser_channel = channel
        yield from self._parts(self._parser.feed(text))

    def _reads(self, channel: Channel) -> bool:
        """Whether calls are looked for in a channel: harmony writes them in one of their own, as a server's come."""
        return bool(self._parsed.request.tools) and (channel == "tool") == (self._form in ("harmony", "server"))

    def _parts(self, parts: list[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if isinstance(part, ToolCall):
                self._calls.append(part)
                yield self._delta({"tool_calls": [{"index": len(self._calls) - 1, **_call(part)}]})
            else:
                self._content.append(part)
                yield self._delta({"content": part})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk({"delta": delta})


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": finite(value), "bytes": data} for _, text, value, data in token.top]
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": token.bytes, "top_logprobs": top}
