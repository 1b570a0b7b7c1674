"""Tool calls in the text of a reply, in the ways that models write them. What is no whole call stays text.

Knows formats only. Nothing is evaluated; a call longer than ``MAX_CALL_CHARS`` is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dflash_local.chat.channels import overlap
from dflash_local.chat.tool_arguments import DECODER, ArgumentTypes, unwrapped
from dflash_local.request import ToolCall

MAX_CALL_CHARS = 2**18
MAX_ENDS = 16  # closing tags inside one call's arguments; more, and it is no call
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PYTHON_TAG = "<|python_tag|>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

CallFormat = Literal["hermes", "xml", "llama", "harmony", "server"]
GENERAL_FORM: CallFormat = "hermes"  # where the tools are told in words (``chat.tool_prompt``)
Part = str | ToolCall
Tools = Sequence[Mapping[str, Any]]

_RECIPIENT = re.compile(r"\s*to=(?:functions\.)?([A-Za-z0-9_.-]{1,128})\s+(?=\{)")


def format_of(template: str | None) -> CallFormat | None:
    """Return how a model with this chat template writes calls; None when it takes no tools, or in no way known here.

    ``hermes``: JSON in ``<tool_call>`` (Qwen3); ``xml``: ``<function=name>`` in it (Qwen3.5, Qwen3-Coder);
    ``llama``: a reply that is a JSON object (Llama 3.1); ``harmony``: a commentary message (gpt-oss). Not of a
    template: ``server``, where a server of another program finds them itself.
    """
    if not template or "tools" not in template:
        return None
    if "<|channel|>" in template and "functions" in template:
        return "harmony"
    if OPEN in template:
        return "xml" if FUNCTION in template else "hermes"
    return "llama" if "parameters" in template and "<|start_header_id|>" in template else None


def _call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))


class TaggedParser:
    """``<tool_call>`` with JSON or with ``<function=name>`` in it; the latter may come without the tag.

    Space beside a call belongs to the markup and is dropped. Text may come cut into any pieces.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._held = ""
        self._inside = ""  # the tag that opened the call being read, empty outside
        self._called = False
        self._stray = False  # a closing tag may follow a call that had no opening one
        self._searched = 0  # characters of the call in which no further end was found
        self._ends = 0

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held:
            before = (len(self._held), self._inside)
            parts += self._read_call() if self._inside else self._read_text()
            if (len(self._held), self._inside) == before:
                break
        return parts

    def finish(self) -> list[Part]:
        """Return a last call whose closing tag never came, or the text that looked like one."""
        held, opened, self._held, self._inside = self._held, self._inside, "", ""
        if not opened:
            return [] if self._called and not held.strip() else _texts(held)
        calls = self._calls(held, opened)
        return list(calls) if calls else _texts(("" if opened == FUNCTION else opened) + held)

    def _read_text(self) -> list[Part]:
        if self._stray:
            bare = self._held.lstrip()
            if CLOSE.startswith(bare) and bare != CLOSE:
                return []  # it may still come
            self._stray = False
            if bare.startswith(CLOSE):
                self._held = bare[len(CLOSE) :]
        starts = [(at, tag) for tag in (OPEN, FUNCTION) if (at := self._held.find(tag)) >= 0]
        if starts:
            at, tag = min(starts)
            text, self._held = self._held[:at].rstrip(), self._held[at:]
            if tag == OPEN:
                self._held = self._held[len(OPEN) :]
            self._inside, self._searched, self._ends = tag, 0, 0
            return self._shown(text)
        keep = max(overlap(self._held, OPEN), overlap(self._held, FUNCTION))
        sure = self._held[: len(self._held) - keep].rstrip()  # the space may stand before a call
        self._held = self._held[len(sure) :]
        return self._shown(sure)

    def _shown(self, text: str) -> list[Part]:
        if self._called:
            text = text.lstrip()
        if text:
            self._called = False
        return _texts(text)

    def _read_call(self) -> list[Part]:
        """Return the call, once its end is there; text, once it cannot be one."""
        end = CLOSE if self._inside == OPEN else END_FUNCTION
        at = self._held.find(end, max(0, self._searched - len(end)))
        while at >= 0:
            body = self._held[: at if end == CLOSE else at + len(end)]
            calls = self._calls(body, self._inside)
            if calls:
                self._held = self._held[at + len(end) :]
                self._stray, self._called = self._inside == FUNCTION, True
                self._inside = ""
                return list(calls)
            self._ends += 1
            if self._ends > MAX_ENDS or not _unfinished(body):
                return self._give_up(at + len(end))
            self._searched = at + 2 * len(end)
            at = self._held.find(end, at + len(end))
        self._searched = max(self._searched, len(self._held))
        return self._give_up(len(self._held)) if len(self._held) > MAX_CALL_CHARS else []

    def _give_up(self, count: int) -> list[Part]:
        opened = OPEN if self._inside == OPEN else ""
        text, self._held, self._inside = opened + self._held[:count], self._held[count:], ""
        return self._shown(text)

    def _calls(self, body: str, opened: str) -> tuple[ToolCall, ...]:
        """Return the calls of what stands between the tags; none when it is no whole call."""
        text = body.strip()
        if opened == OPEN and text.startswith("{"):
            found = _json_call(text, ("arguments", "parameters"))
            return (found,) if found else ()
        if not text.startswith(FUNCTION):
            return ()
        functions = [part for part in text.split(END_FUNCTION) if part.strip()]  # a last end may be forgotten
        calls = [_xml_call(part.strip(), self._schemas) for part in functions]
        return tuple(call for call in calls if call) if all(calls) else ()


class JsonParser:
    """A text that is nothing but JSON: ``{"name": ..., "parameters": ...}``, or, for harmony, the arguments alone.

    Harmony names the recipient in the message's header. Where the text does not begin with it
    (``to=functions.name {``) the one tool offered is meant, or the one whose parameters fit.
    """

    _recipient = _RECIPIENT

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._held: list[str] = []
        self._count = 0
        self._kind: Literal["unknown", "json", "plain"] = "unknown"

    def feed(self, text: str) -> list[Part]:
        """Return nothing until the text is whole or cannot be a call."""
        if self._kind == "plain":
            return _texts(text)
        self._held.append(text)
        self._count += len(text)
        if self._kind == "unknown":
            start = "".join(self._held).lstrip().removeprefix(PYTHON_TAG).lstrip()
            if start.startswith("{"):
                self._kind = "json"
            elif not (start.startswith("to=") or "to=".startswith(start) or PYTHON_TAG.startswith(start)):
                return self._give_up()
        return self._give_up() if self._count > MAX_CALL_CHARS else []

    def finish(self) -> list[Part]:
        calls = self._calls("".join(self._held)) if self._held else None
        if not calls:
            return self._give_up()
        self._held.clear()
        return list(calls)

    def _give_up(self) -> list[Part]:
        text, self._kind = "".join(self._held), "plain"
        self._held.clear()
        return _texts(text)

    def _calls(self, text: str) -> list[ToolCall] | None:
        """Return all calls of the text, parted by ``;`` or space; None when anything else stands there."""
        rest, calls = text.strip().removeprefix(PYTHON_TAG), []
        while rest := rest.strip("; \n\t\r"):
            named = self._recipient.match(rest)
            rest = rest[named.end() :] if named else rest
            try:
                content, end = DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            call = self._of(content, named[1] if named else None)
            if call is None:
                return None
            calls.append(call)
            rest = rest[end:]
        return calls

    def _of(self, content: object, recipient: str | None) -> ToolCall | None:
        if not isinstance(content, dict):
            return None
        if recipient is not None:
            return _call(recipient, content)
        whole = _json_object_call(content, ("parameters", "arguments"))
        if whole is not None:
            return whole if whole.name in self._schemas else None
        fitting = [name for name, function in self._schemas.items() if ArgumentTypes(function).fit(content)]
        return _call(fitting[0], content) if len(fitting) == 1 else None


class ServerParser(JsonParser):
    """Calls that a vLLM or SGLang server found in the text itself: ``name {arguments}``, a line each."""

    _recipient = re.compile(rf"({NAME.pattern})\s+(?=\{{)")

    def feed(self, text: str) -> list[Part]:
        """Return nothing until the text is whole."""
        self._kind = "json"
        return super().feed(text)


CallParser = TaggedParser | JsonParser


def call_parser(form: CallFormat, tools: Tools) -> CallParser:
    """Return the parser for a reply in this format. ``tools`` are the schemas that were offered."""
    functions = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    schemas = {function["name"]: function for function in functions if isinstance(function.get("name"), str)}
    if form in ("hermes", "xml"):
        return TaggedParser(schemas)
    return ServerParser(schemas) if form == "server" else JsonParser(schemas)


def _texts(text: str) -> list[Part]:
    return [text] if text else []


def _unfinished(body: str) -> bool:
    """Return whether the closing tag may stand inside an argument's text, so that the end is yet to come."""
    text = body.strip()
    if text.startswith(FUNCTION):
        return not text.endswith(END_FUNCTION) and text.count(PARAMETER) > text.count(END_PARAMETER)
    try:
        DECODER.raw_decode(text)
    except ValueError as error:
        return "Unterminated string" in str(error)
    except RecursionError:
        return False
    return False


def _json_call(text: str, keys: Sequence[str]) -> ToolCall | None:
    try:
        content = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return _json_object_call(content, keys) if isinstance(content, dict) else None


def _json_object_call(content: Mapping[str, Any], keys: Sequence[str]) -> ToolCall | None:
    name = content.get("name")
    arguments: Any = next((content[key] for key in keys if key in content), None)
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return _call(name, arguments)


def _xml_call(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """Read ``<function=name>`` and its parameters, without the closing tag."""
    head, bracket, body = text.partition(">")
    name = head.removeprefix(FUNCTION).strip()
    if not bracket or not head.startswith(FUNCTION) or not NAME.fullmatch(name):
        return None
    types, arguments = ArgumentTypes(schemas.get(name, {})), {}
    for part in body.split(PARAMETER)[1:]:
        key, bracket, rest = part.partition(">")
        if not bracket:
            return None
        key = key.strip()
        arguments[key] = types.typed(key, unwrapped(rest.partition(END_PARAMETER)[0]))
    return _call(name, arguments)
