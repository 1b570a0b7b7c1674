"""The grammar of a call that must be made, as a model writes it: in Lark, for ``engine.grammar``.

What stands where is said by the formats themselves (``Body.written``, ``ParameterMarkup``), as their parsers have it.
Tags that are tokens of the model are those tokens. A value without quotes may not hold a tag of its own format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from llguidance import regex_to_lark

from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_arguments import ArgumentTypes
from dflash_local.chat.tool_calls import GENERAL_FORM, CallFormat, CommentaryParser, JsonParser, format_of
from dflash_local.chat.tool_formats import FORMS, PLACES, ParameterBody, ParameterMarkup
from dflash_local.errors import UsageError
from dflash_local.request import Constraint, Request

# Between the tokens of JSON: a space, or a line end and what indents the next line. A model cannot go on with it.
SPACE = r" |\n[ \t]{0,32}"
NOTHING_ASKED: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Of texts; what another one says of a text is a note, as JSON Schema has it.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
REFERENCE = '"$ref": "#'
ANY_TEXT = "/(?s:.*)/"
ENDS = re.compile(r"(?<!\\)(\\\\)*\$\Z")  # a pattern, with its last character
_RULES = """\
space: /[ \\n]{1,2}/
TEXT: /(?s:.+)/
index: /[0-9]{1,3}/
attributes: /( [a-z_]{1,16}="[^<>"]{0,32}"){1,3}/
"""


def json_rule(schema: object) -> str:
    """Return what stands in a rule for JSON by a schema."""
    if isinstance(schema, Mapping):
        schema = {**_known_formats(schema), "x-guidance": {"whitespace_pattern": SPACE}}
    return f"%json {json.dumps(schema)}"


def _known_formats(schema: Any) -> Any:
    """Return a schema without the formats that the grammar's library would refuse."""
    if isinstance(schema, list):
        return list(map(_known_formats, schema))
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("enum", "const") else _known_formats(value)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in FORMATS
    }


def _rule_of_part(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return what ``json_rule`` does for a part of a schema, whose references lead into all of it."""
    rule = json_rule(schema)
    if REFERENCE not in rule:
        return rule
    return json_rule({**schema, "$defs": {"all": root}}).replace(REFERENCE, f"{REFERENCE}/$defs/all")


def forced_call(tokenizer: Tokenizer, request: Request) -> Constraint:
    """Return the constraint of an answer that is one of the calls which a request demands.

    Raises:
        UsageError: this model's calls cannot be held to a grammar.
    """
    functions = [tool["function"] for tool in request.tools if tool["function"]["name"] in request.must_call]
    writer = _CallWriter(tokenizer, format_of(tokenizer.template) or GENERAL_FORM)
    calls = " | ".join(map(writer.call, functions))
    more = " (space? call)*" if len(functions) > 1 and not writer.before else ""
    start = f"start: {writer.before} call{more}"
    return Constraint("lark", "\n".join([start, f"call: {calls}", _RULES, *writer.rules]))


class _CallWriter:
    """Writes the rules of one format's calls.

    Attributes:
        before: what may stand before a call that ends the reply; empty where further calls may follow.
    """

    def __init__(self, tokenizer: Tokenizer, form: CallFormat) -> None:
        self.rules: list[str] = []
        self._tokenizer, self._numbers = tokenizer, count()
        self._around = ("", "")
        self._markup: ParameterMarkup | None = None
        if form in FORMS:
            body = FORMS[form].bodies[0]
            self._written, self._around = body.written, FORMS[form].pairs[0]
            self._markup = body.markup if issubclass(body, ParameterBody) else None
        else:
            self._written = {"llama": JsonParser.written, "harmony": CommentaryParser.written}.get(form, "")
        self.before = f"({self._text(CommentaryParser.thought, {})})?" if form == "harmony" else ""
        if not self._written:
            raise UsageError(f"calls cannot be forced in this model's format, {form}", "leave out tool_choice")

    def call(self, function: Mapping[str, Any]) -> str:
        """Return the rule of a call of one function."""
        name, schema = function["name"], function.get("parameters") or NOTHING_ASKED
        opening, close = self._around
        values: dict[str, Callable[[], str]] = {
            "{name}": lambda: self._literal(name),
            "{arguments}": lambda: self._rule(json_rule({**schema, "type": "object"})),
            "{parameters}": lambda: " ".join(self._parameters(function)),
        }
        text = f"{opening}\n{self._written}\n{close}" if opening else self._written
        return self._rule(self._text(text, values))

    def _text(self, text: str, values: Mapping[str, Callable[[], str]]) -> str:
        """Return what stands in a rule for a text with places."""
        fixed = {"\n": "space?", "{text}": "TEXT?", "{index}": "index", "{before}": "", "{after}": "attributes?"}
        parts = (
            values[part]() if part in values else fixed[part] if part in fixed else self._literal(part)
            for part in PLACES.split(text)
        )
        return " ".join(filter(None, parts))

    def _literal(self, text: str) -> str:
        """Return a text as it is; control tokens in it are tokens."""
        return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in self._split(text))

    def _split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the parts of a text, each with the id of its control token."""
        pattern, at = self._tokenizer.control_pattern, 0
        for found in pattern.finditer(text) if pattern is not None else ():
            if at < found.start():
                yield text[at : found.start()], None
            yield found[0], self._tokenizer.token_id(found[0])
            at = found.end()
        if at < len(text):
            yield text[at:], None

    def _rule(self, body: str, terminal: bool = False) -> str:
        """Add a rule and return its name."""
        name = f"{'T' if terminal else 'r'}{next(self._numbers)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _parameters(self, function: Mapping[str, Any]) -> Iterator[str]:
        """Yield the parameters in the order of the schema; what is not required may be left out."""
        types, root = ArgumentTypes(function), function.get("parameters") or {}
        assert self._markup is not None
        for key in types.properties:
            opening = self._text(self._markup.opening, {"{key}": lambda key=key: self._literal(key)})  # type: ignore[misc]
            schema = types.whole(key)
            if types.may_be_text(key):
                value = self._bare(schema)
            else:
                value = f"space? {self._rule(_rule_of_part(schema, root))} space? {self._literal(self._markup.close)}"
            rule = self._rule(f"{opening} {value} space?")
            yield rule if key in types.required else f"{rule}?"

    def _bare(self, schema: Mapping[str, Any]) -> str:
        """Return what stands for a value that is written as it is, and for the tag behind it."""
        assert self._markup is not None
        around = "\n" if self._markup.own_lines else ""
        # One terminal up to the tag, as far as that is text: alone the value would take the tag for a part of it.
        (head, token), *rest = self._split(around + self._markup.close)
        behind = [self._literal(part) for part, _ in ([(head, token), *rest] if token is not None else rest)]
        ended = "" if token is not None else json.dumps(head)
        parts = [json.dumps(around) if around else "", f"( {self._value(schema)} )", ended]
        name = self._rule(" ".join(filter(None, parts)), terminal=True)
        empty = "" in _options(schema) if _options(schema) else not schema.get("minLength") and "pattern" not in schema
        return " ".join([f"{name}?" if empty and not around + ended else name, *behind])

    def _value(self, schema: Mapping[str, Any]) -> str:
        """Return the terminal of a text by a schema, without the tags of a parameter in it."""
        assert self._markup is not None
        if options := _options(schema):
            return " | ".join(map(json.dumps, options))
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = [f"/(?s:.{{{low},{high}}})/" if low or high != "" else ANY_TEXT]
        if isinstance(pattern := schema.get("pattern"), str):
            before, after = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if ENDS.search(pattern) else "(?s:.*)")
            core = pattern[: -1 if not after else None].removeprefix("^")
            parts.append(f"/{regex_to_lark(f'{before}(?:{core}){after}', 'dw')}/")
        for tag in (self._markup.close, PLACES.split(self._markup.opening)[0]):
            parts.append(f"~( {ANY_TEXT} {json.dumps(tag)} {ANY_TEXT} )")
        return " & ".join(parts)


def _options(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts that are allowed, where a schema lists them."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values]
