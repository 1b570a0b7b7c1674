"""Events to the chunks and the body of a chat completion: content, reasoning, tool calls, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from dflash_local.api.figures import Tally, finite
from dflash_local.api.request_fields import ParsedRequest
from dflash_local.api.token_ids import TokenIds
from dflash_local.chat.tool_calls import CallParser, Part, call_parser
from dflash_local.events import Channel, Finished, Notice, Piece, Started, Step, TokenLogprob
from dflash_local.request import ToolCall
from dflash_local.service.resident import Model


class ChatReply:
    """One reply, for streaming (``started``, ``step``, ``finished`` give chunks) or whole (``body``).

    Args:
        head: id, created, model and system_fingerprint of every object.
    """

    kind = "chat.completion"

    def __init__(self, parsed: ParsedRequest, model: Model, head: Callable[[], dict[str, Any]]) -> None:
        self._parsed, self._head = parsed, head
        self._tally = Tally()
        self._ids = TokenIds(parsed.request)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: list[dict[str, Any]] = []
        self._unsent = 0  # log probabilities already in a chunk
        self._form = model.call_format
        self._parser: CallParser | None = None
        self._parser_channel: Channel = "final"  # the channel that the parser reads

    def begin(self) -> Iterator[dict[str, Any]]:
        """The chunk that says who speaks."""
        yield self._chunk({"role": "assistant", "content": ""})

    def started(self, event: Started) -> None:
        """The prompt is processed."""
        self._tally.started(event)
        self._ids.started(event)

    def notice(self, event: Notice) -> None:
        """What the reply's reader should know."""
        self._tally.notice(event)

    def step(self, event: Step) -> Iterator[dict[str, Any]]:
        """The chunks of one step."""
        self._tally.step(event)
        self._ids.step(event)
        self._logprobs += [_token(found) for found in event.logprobs]
        for channel, pieces in groupby(event.pieces, key=_channel_of):
            yield from self._text(channel, "".join(piece.text for piece in pieces))

    def finished(self, event: Finished) -> Iterator[dict[str, Any]]:
        """The last chunks: what was held back, the reason, the figures."""
        yield from self._parts(self._parser.finish() if self._parser else [])
        figures = {"metrics": self._tally.metrics(event)}
        last = self._chunk({}, self._reason(event))
        if not self._parsed.include_usage:
            yield {**last, **figures}
            return
        yield last
        head = {**self._head(), "object": f"{self.kind}.chunk"}
        yield {**head, "choices": [], "usage": self._tally.usage(event), **figures}

    def body(self, event: Finished) -> dict[str, Any]:
        """The whole answer; the chunks must have been drawn before."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        if self._content or not self._calls:
            message["content"] = "".join(self._content)
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [_call(call) for call in self._calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(event)}
        self._ids.rewind()
        choice |= self._ids.reply()
        if self._parsed.request.logprobs is not None:
            choice["logprobs"] = {"content": self._logprobs}
        return {
            **self._head(),
            "object": self.kind,
            "choices": [choice],
            **self._ids.prompt(),
            "usage": self._tally.usage(event),
            "metrics": self._tally.metrics(event),
        }

    def _reason(self, event: Finished) -> str:
        return "tool_calls" if self._calls and event.reason == "stop" else event.reason

    def _text(self, channel: Channel, text: str) -> Iterator[dict[str, Any]]:
        if channel == "thinking":
            self._reasoning.append(text)
            yield self._chunk({"reasoning_content": text})
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
        """Whether calls are looked for in a channel: harmony writes them in one of their own."""
        return self._parsed.tools_offered and (channel == "tool") == (self._form == "harmony")

    def _parts(self, parts: list[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if isinstance(part, ToolCall):
                self._calls.append(part)
                yield self._chunk({"tool_calls": [{"index": len(self._calls) - 1, **_call(part)}]})
            else:
                self._content.append(part)
                yield self._chunk({"content": part})

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        choice |= self._ids.reply()
        if self._parsed.request.logprobs is not None and self._unsent < len(self._logprobs):
            choice["logprobs"] = {"content": self._logprobs[self._unsent :]}
            self._unsent = len(self._logprobs)
        chunk = {**self._head(), "object": f"{self.kind}.chunk", "choices": [choice], **self._ids.prompt()}
        return {**chunk, "usage": None} if self._parsed.include_usage else chunk


def _channel_of(piece: Piece) -> Channel:
    return piece.channel


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token(token: TokenLogprob) -> dict[str, Any]:
    top = [{"token": text, "logprob": finite(value), "bytes": _bytes(text)} for _, text, value in token.top]
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": _bytes(token.text), "top_logprobs": top}


def _bytes(text: str) -> list[int] | None:
    """The token's bytes; None for a part of a character, whose bytes are not known here."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
