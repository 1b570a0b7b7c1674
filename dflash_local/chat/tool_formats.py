"""How models write tool calls between tags. The next format is an entry of ``FORMS``.

A call's text comes in parts, each up to a closing tag: a body says whether that tag stands inside an argument.
Every part is read once, so a long argument, or one full of tags, costs no more than its length.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.chat.tool_arguments import DECODER, ArgumentTypes, unwrapped
from dflash_local.request import ToolCall

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
Schemas = Mapping[str, Mapping[str, Any]]


def tool_call(schemas: Schemas, name: str, arguments: Mapping[str, Any], call_id: str = "") -> ToolCall:
    """Return the call with an id, a new one where the model gave none, and with the types of its schema."""
    fitted = ArgumentTypes(schemas.get(name, {})).fitted(arguments)
    return ToolCall(call_id or f"call_{secrets.token_hex(12)}", name, json.dumps(fitted, ensure_ascii=False))


def named_call(
    schemas: Schemas, content: object, keys: tuple[str, ...] = ("arguments", "parameters")
) -> ToolCall | None:
    """Return the call that a JSON object with a name and arguments means; None where it means none."""
    if not isinstance(content, dict):
        return None
    name = content.get("name")
    arguments: Any = next((content[key] for key in keys if key in content), None)
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(arguments, dict):
        return None
    return tool_call(schemas, name, arguments)


class Body(ABC):
    """The text of a call, or of a section of calls.

    Args:
        lenient: a value whose end is missing ends at the next parameter or at the end.

    Attributes:
        inside: the text that came so far ends inside an argument's text.
        written: how a call is written, for the grammar of one that is forced (``chat.call_grammar``); empty where
            that needs more than JSON and text. ``{name}``, ``{index}``: a number; ``{arguments}``: as JSON;
            ``{parameters}``: as ``ParameterMarkup`` says. A line break may be any short space, or be left out.
    """

    inside = False
    written: ClassVar[str] = ""

    def __init__(self, schemas: Schemas, lenient: bool = False) -> None:
        self._schemas, self._lenient = schemas, lenient

    @abstractmethod
    def add(self, part: str) -> None:
        """Take the text up to the next closing tag, or to its end where the tag is part of the body."""

    @abstractmethod
    def calls(self, text: str) -> list[ToolCall]:
        """Return all calls of the whole text; none where any of it is no call."""

    def hopeless(self, text: str) -> bool:
        """Return whether no text behind this one can make it a call."""
        return False

    def ended(self, text: str) -> bool:
        """Return whether nothing of the call is missing but its closing tag."""
        return True


class JsonBody(Body):
    """JSON objects: with name and arguments, or (``head`` names the function) the arguments alone."""

    head = re.compile(r"\s*(?=\{)")
    tail = re.compile(r"\s*")
    written = '{"name": "{name}", "arguments": {arguments}}'
    _quote = re.compile(r'\\.|"', re.DOTALL)

    def add(self, part: str) -> None:
        """See ``Body``."""
        self.inside ^= sum(match[0] == '"' for match in self._quote.finditer(part)) % 2 == 1

    def calls(self, text: str) -> list[ToolCall]:
        """See ``Body``."""
        try:
            calls = list(self._read(text))
        except (ValueError, RecursionError):
            return []
        return [call for call in calls if call] if all(calls) else []

    def hopeless(self, text: str) -> bool:
        """See ``Body``."""
        try:
            list(self._read(text))
        except ValueError as error:
            return "Unterminated string" not in str(error)
        except RecursionError:
            return True
        return False

    def _read(self, text: str) -> Iterator[ToolCall | None]:
        """Yield the calls, None for an object that is none. ValueError: something else stands there."""
        at = 0
        while at < len(text.rstrip()):
            head = self.head.match(text, at)
            if head is None:
                raise ValueError("no head of a call")
            content, at = DECODER.raw_decode(text, head.end())
            tail = self.tail.match(text, at)
            if tail is None:
                raise ValueError("no end of a call")
            at = tail.end()
            yield self._call(content, head)

    def _call(self, content: object, head: re.Match[str]) -> ToolCall | None:
        return named_call(self._schemas, content)


class KimiBody(JsonBody):
    """``functions.NAME:INDEX`` before the arguments. That is the call's id, which the template writes again."""

    head = re.compile(
        rf"\s*(?:<\|tool_call_begin\|>)?\s*((?:functions\.)?({NAME.pattern})(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*(?=\{)"
    )
    tail = re.compile(r"\s*(?:<\|tool_call_end\|>|\Z)")
    written = "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    def _call(self, content: object, head: re.Match[str]) -> ToolCall | None:
        call_id = head[1] if ":" in head[1] else ""
        return tool_call(self._schemas, head[2], content, call_id) if isinstance(content, dict) else None


class GemmaBody(Body):
    """``call:NAME{key:value}``: JSON but for bare keys and for strings, which stand between ``<|"|>``."""

    string = '<|"|>'
    _head = re.compile(rf"\s*call:({NAME.pattern})\s*(?=\{{)")
    _key = re.compile(r'([{,]\s*)([^\s{},:"\[\]]+)(?=\s*:)')

    def add(self, part: str) -> None:
        """See ``Body``."""
        self.inside ^= part.count(self.string) % 2 == 1

    def hopeless(self, text: str) -> bool:
        """See ``Body``."""
        return not self._head.match(text)

    def calls(self, text: str) -> list[ToolCall]:
        """See ``Body``."""
        head = self._head.match(text)
        if head is None:
            return []
        parts = text[head.end() :].strip().split(self.string)
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        parts[0::2] = [self._key.sub(r'\1"\2"', part) for part in parts[0::2]]
        try:
            content = DECODER.decode("".join(parts))
        except (ValueError, RecursionError):
            return []
        return [tool_call(self._schemas, head[1], content)] if isinstance(content, dict) else []


@dataclass(frozen=True, slots=True)
class ParameterMarkup:
    """Markup of calls whose parameters have tags of their own, and values without escapes.

    All are texts as models write them, from which both the parser's patterns and the grammar of a forced call are made;
    ``{before}`` and ``{after}`` stand for further attributes, a line break for space.

    Attributes:
        head: of a function, with ``{name}``. end: of a function; empty where it is the call's closing tag.
        opening: of a parameter, with ``{key}``. close: of a parameter.
        own_lines: a value stands on lines of its own, whose line breaks are not part of it.
    """

    head: str
    end: str
    opening: str
    close: str
    own_lines: bool = False


_AT_END = r"\Z"
_PATTERNS = {
    "{name}": rf"\s{{0,64}}({NAME.pattern})\s{{0,64}}",
    "{key}": r'([^<>"]{1,256})',
    "{before}": "[^<>]{0,256}?",
    "{after}": "[^<>]{0,256}",
    "\n": r"\s{0,64}",
}
PLACES = re.compile(r"(\{[a-z]+\}|\n)")


def _pattern(text: str) -> str:
    """Return what matches a text of ``ParameterMarkup``."""
    return "".join(_PATTERNS.get(part) or re.escape(part) for part in PLACES.split(text))


class ParameterBody(Body):
    """Calls as ``ParameterMarkup`` says.

    A value may hold tags: whole parameters in it are counted, and a closing tag ends it only where another
    parameter or an end follows.
    """

    markup: ClassVar[ParameterMarkup]
    _head: re.Pattern[str]
    _tag: re.Pattern[str]
    _after: re.Pattern[str]  # what makes a closing tag the end of a value
    _after_or_end: re.Pattern[str]
    _gap: re.Pattern[str]

    def __init_subclass__(cls) -> None:
        markup = cls.markup
        cls.written = f"{markup.head}\n{{parameters}}{markup.end}"
        close, end, opening, head = map(_pattern, (markup.close, markup.end, markup.opening, markup.head))
        head += "" if end else rf"(?={re.escape(PLACES.split(markup.opening)[0])}|{_AT_END})"
        cls._head = re.compile(rf"\s*{head}")
        cls._tag = re.compile(rf"(?P<close>{close})|{opening}")
        cls._after = re.compile(rf"\s*(?:{opening}|{end or _AT_END})")
        cls._after_or_end = re.compile(rf"{cls._after.pattern}|\s*{_AT_END}")
        cls._gap = re.compile(rf"(?P<end>{end})|{head}" if end else rf"\A(?P<end>)??\s*{head}")

    def __init__(self, schemas: Schemas, lenient: bool = False) -> None:
        super().__init__(schemas, lenient)
        self._length = 0
        self._depth = 0
        self._values: list[tuple[str, int, int, int, int]] = []  # key, its tag, begin and end of the value, its tag
        self._opened = ("", 0, 0)
        self._known: set[str] = set()

    def add(self, part: str) -> None:
        """See ``Body``."""
        if not self._length:
            head = self._head.match(part)
            self._known = set(ArgumentTypes(self._schemas.get(head[1], {})).properties) if head else set()
        after = self._after_or_end if self._lenient else self._after
        for tag in self._tag.finditer(part):
            start, end = self._length + tag.start(), self._length + tag.end()
            if tag["close"] is None:
                self._open(tag[tag.lastindex or 0].strip(), start, end)
            elif self.inside and self._depth:
                self._depth -= 1
            elif self.inside and after.match(part, tag.end()):
                self._close(start, end)
        self._length += len(part)

    def _open(self, key: str, start: int, end: int) -> None:
        if self.inside and not self._lenient:
            self._depth += 1
        elif self.inside:
            if key in self._known and key not in {self._opened[0], *(value[0] for value in self._values)}:
                self._close(start, start)
                self._opened, self.inside = (key, start, end), True
        else:
            self._opened, self.inside = (key, start, end), True

    def _close(self, start: int, end: int) -> None:
        self._values.append((*self._opened, start, end))
        self.inside = False

    def hopeless(self, text: str) -> bool:
        """See ``Body``."""
        return not self._head.match(text)

    def ended(self, text: str) -> bool:
        """See ``Body``."""
        return bool(self.markup.end) and text.rstrip().endswith(self.markup.end)

    def calls(self, text: str) -> list[ToolCall]:
        """See ``Body``."""
        if not self._head.match(text):
            return []
        if self.inside:
            if not self._lenient:
                return []
            bare = text.rstrip()
            end = len(bare.removesuffix(self.markup.end).removesuffix(self.markup.close))
            self._close(end, end)
        calls: list[tuple[str, ArgumentTypes, dict[str, Any]]] = []
        at, running = 0, False
        for key, before, begin, end, after in [*self._values, ("", len(text), 0, 0, 0)]:
            for mark in self._gap.finditer(text[at:before]) if at == 0 or self.markup.end else ():
                if mark["end"]:
                    running = False
                elif not running:
                    name, running = mark[mark.lastindex or 0], True
                    calls.append((name, ArgumentTypes(self._schemas.get(name, {})), {}))
            if begin and running:
                value = unwrapped(text[begin:end]) if self.markup.own_lines else text[begin:end]
                calls[-1][2][key] = calls[-1][1].typed(key, value)
            at = after
        return [tool_call(self._schemas, name, arguments) for name, _, arguments in calls]


class QwenBody(ParameterBody):
    """Qwen3-Coder and from Qwen3.5 on."""

    markup = ParameterMarkup("<function={name}>", END_FUNCTION, "<parameter={key}>", "</parameter>", own_lines=True)


class GlmBody(ParameterBody):
    """GLM from 4.5 on."""

    markup = ParameterMarkup("{name}", "", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>")


class MiniMaxBody(ParameterBody):
    """MiniMax-M2."""

    markup = ParameterMarkup('<invoke name="{name}">', "</invoke>", '<parameter name="{key}">', "</parameter>")


class KimiK3Body(ParameterBody):
    """Kimi-K3's tools section."""

    markup = ParameterMarkup(
        '<|open|>call {before}tool="{name}"{after}<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>argument {before}key="{key}"{after}<|sep|>',
        "<|close|>argument<|sep|>",
    )


@dataclass(frozen=True, slots=True)
class Form:
    """A format.

    Attributes:
        pairs: opening and closing tags of a call or a section. The opening tag of a later pair is part of its body,
            and so is its closing tag; the closing tag of the first may follow it.
        bodies: what may stand between them; the first that is not hopeless at the first closing tag counts. The first
            of all is what a forced call is written as.
        template: texts that the chat template of such a model has, all of them.
    """

    pairs: tuple[tuple[str, str], ...]
    bodies: tuple[type[Body], ...]
    template: tuple[str, ...]


_SECTION = "<|tool_calls_section_begin|>"
_TAGGED = ((OPEN, CLOSE), (FUNCTION, END_FUNCTION))

# The first whose texts a template has is its format: the more particular stand before the general.
FORMS: dict[str, Form] = {
    "kimi": Form(
        ((_SECTION, "<|tool_calls_section_end|>"), ("<|tool_call_begin|>", "<|tool_call_end|>")),
        (KimiBody,),
        (_SECTION,),
    ),
    "kimi-k3": Form(
        (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),), (KimiK3Body,), ("<|open|>tools", "<|open|>argument")
    ),
    "minimax": Form(
        (("<minimax:tool_call>", "</minimax:tool_call>"), ('<invoke name="', "</invoke>")),
        (MiniMaxBody,),
        ("<minimax:tool_call>",),
    ),
    "gemma": Form((("<|tool_call>", "<tool_call|>"),), (GemmaBody,), ("<|tool_call>", "call:")),
    "glm": Form(((OPEN, CLOSE),), (GlmBody,), (OPEN, "<arg_key>")),
    "xml": Form(_TAGGED, (QwenBody, JsonBody), (OPEN, FUNCTION)),
    "hermes": Form(_TAGGED, (JsonBody, QwenBody), (OPEN,)),
}
# What calls are told by, and some tokenizers have as special tokens, which are hidden elsewhere.
MARKUP_TOKENS = frozenset(
    {tag for form in FORMS.values() for pair in form.pairs for tag in pair}
    | {"<|tool_call_argument_begin|>", GemmaBody.string}
)
