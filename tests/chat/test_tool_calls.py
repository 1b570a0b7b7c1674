"""Tool calls out of reply text, however it is cut into pieces; what is no whole call stays text."""

from __future__ import annotations

import json
import random
import time
from itertools import count
from typing import Any

import pytest

from dflash_local.chat import tool_arguments
from dflash_local.chat.tool_calls import MAX_CALL_CHARS, CallFormat, call_parser, format_of
from dflash_local.request import ToolCall

SCHEMA = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "tags": {"type": "array"},
    "extra": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "null"]},
}


def tool(name: str, properties: dict[str, Any] | None = None, required: tuple[str, ...] = ()) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("read", SCHEMA, ("path",)), tool("now")]


def parsed(
    form: CallFormat, text: str, cut: int = 0, tools: list[Any] | None = None
) -> tuple[str, list[tuple[str, Any]]]:
    """All text and all calls; ``cut`` 0 feeds all at once, 1 by characters, else at random places."""
    parser = call_parser(form, TOOLS if tools is None else tools)
    pieces = [text] if cut == 0 else list(text) if cut == 1 else _randomly(text, cut)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert len({call.id for call in calls}) == len(calls)
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


def _randomly(text: str, seed: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


ONE_READ: dict[CallFormat, str] = {
    "hermes": hermes("read", "%s"),
    "llama": '{"name": "read", "parameters": %s}',
    "harmony": "to=functions.read %s",
    "kimi": "<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "gemma": "<|tool_call>call:read%s<tool_call|>",
}
CASES: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "just text <b>", "just text <b>", []),
    ("hermes", hermes("read", '{"path": "a"}'), "", [("read", {"path": "a"})]),
    ("hermes", "Let me.\n\n" + hermes("now", "{}") + "\n" + hermes("read", '{"path": "b"}'), "Let me.",
     [("now", {}), ("read", {"path": "b"})]),
    ("hermes", hermes("read", '{"path": "</tool_call> and <tool_call>"}'), "",
     [("read", {"path": "</tool_call> and <tool_call>"})]),
    ("hermes", hermes("read", '{"path": "é\\n🙂"}') + "done", "done", [("read", {"path": "é\n🙂"})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})]),
    ("hermes", '<tool_call>\nnot json\n</tool_call>', "<tool_call>\nnot json\n</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>',
     '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "a b;c", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "a b;c", "arguments": {}}</tool_call>', []),
    ("hermes", "<tool_call>bad</tool_call>" + hermes("now", "{}"), "<tool_call>bad</tool_call>", [("now", {})]),
    ("hermes", '<tool_call>{"name": "no', '<tool_call>{"name": "no', []),
    ("hermes", "a < b and <tool_ca", "a < b and <tool_ca", []),
    ("hermes", "text with an end  \n", "text with an end  \n", []),
    ("xml", xml("read", path="src/a.py"), "", [("read", {"path": "src/a.py"})]),
    ("xml", "I look.\n" + xml("now") + "\n" + xml("read", path="x", count="3"), "I look.",
     [("now", {}), ("read", {"path": "x", "count": 3})]),
    ("xml", xml("read", path="12", count="12", share="0.5", deep="true", tags='["a"]', extra='{"k": 1}'), "",
     [("read", {"path": "12", "count": 12, "share": 0.5, "deep": True, "tags": ["a"], "extra": {"k": 1}})]),
    ("xml", xml("read", path="p", maybe="null"), "", [("read", {"path": "p", "maybe": None})]),
    ("xml", xml("read", path="p", count="many", deep="True", maybe="5", either="null", other="1"), "",
     [("read", {"path": "p", "count": "many", "deep": True, "maybe": 5, "either": None, "other": "1"})]),
    ("xml", xml("read", path="def f():\n    return '<b>'\n\n"), "",
     [("read", {"path": "def f():\n    return '<b>'\n\n"})]),
    ("xml", xml("read", path="\n  kept  \n"), "", [("read", {"path": "\n  kept  \n"})]),
    ("xml", "<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    ("xml", "<function=now>\n</function>", "", [("now", {})]),
    ("xml", "<tool_call>\n<function=read>\n<parameter=path>\nx\n</parameter>\n</tool_call>", "",
     [("read", {"path": "x"})]),
    ("xml", "<tool_call>\n<function=read>\n<parameter=path>\nx\n</parameter>\n</function>", "",
     [("read", {"path": "x"})]),
    ("xml", "<tool_call>\n<function=bad name>\n</function>\n</tool_call>",
     "<tool_call>\n<function=bad name>\n</function>\n</tool_call>", []),
    ("xml", hermes("now", "{}"), "", [("now", {})]),
    ("llama", '{"name": "read", "parameters": {"path": "x"}}', "", [("read", {"path": "x"})]),
    ("llama", ' <|python_tag|>{"name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama", '{"name": "now", "parameters": {}}; {"name": "read", "arguments": {"path": "a"}}', "",
     [("now", {}), ("read", {"path": "a"})]),
    *((form, text % '{"path": "5", "count": "5", "deep": "x", "either": "null", "other": "5"}', "",
       [("read", {"path": "5", "count": 5, "deep": "x", "either": "null", "other": "5"})])
      for form, text in ONE_READ.items()),
    ("llama", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama", '{"name": "now", "parameters": {}} and text', '{"name": "now", "parameters": {}} and text', []),
    ("llama", '{"an": "object"}', '{"an": "object"}', []),
    ("llama", "Hello {world}", "Hello {world}", []),
    ("llama", '{"name": "now", "para', '{"name": "now", "para', []),
    ("harmony", 'to=functions.read {"path": "x"}', "", [("read", {"path": "x"})]),
    ("harmony", '{"path": "x"}', "", [("read", {"path": "x"})]),
    ("harmony", "{}", "", [("now", {})]),
    ("harmony", '{"nobody": 1}', '{"nobody": 1}', []),
    ("harmony", "I will look at it first.", "I will look at it first.", []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"), CASES, ids=[f"{case[0]}{at}" for at, case in enumerate(CASES)]
)
def test_text_and_calls_are_told_apart(form: CallFormat, text: str, said: str, calls: list[tuple[str, Any]]) -> None:
    for cut in range(4):
        assert parsed(form, text, cut) == (said, calls), cut


def test_text_before_a_call_streams_at_once() -> None:
    parser = call_parser("hermes", TOOLS)
    assert parser.feed("Some text ") == ["Some text"]
    assert parser.feed("and more <") == [" and more"]
    assert parser.feed("b") == [" <b"]
    assert parser.feed("<tool_call>") == []
    call = parser.feed('{"name": "now", "arguments": {}}</tool_call>')
    assert len(call) == 1 and isinstance(call[0], ToolCall)


TYPES: dict[str, Any] = {
    "$defs": {
        "Level": {"type": "integer", "enum": [1, 2]},
        "Place": {"type": "object", "properties": {"name": {"type": "string"}}},
        "Chain/0~": {"$ref": "#/$defs/Level"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "integer"}]},
    },
    "properties": {
        "ref": {"$ref": "#/$defs/Level"},
        "chain": {"$ref": "#/$defs/Chain~10~0"},
        "escaped": {"$ref": "#/%24defs/Place"},
        "all": {"allOf": [{"$ref": "#/$defs/Place"}], "description": "one"},
        "narrow": {"type": ["string", "integer"], "allOf": [{"type": ["integer", "null"]}]},
        "enum": {"enum": [1, 2.5, None]},
        "words": {"enum": ["1", "null"]},
        "const": {"const": True},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "list": {"oneOf": [{"type": "array", "items": {"$ref": "#/$defs/Place"}}, {"type": "string"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "tree": {"$ref": "#/$defs/Tree"},
        "nowhere": {"$ref": "#/$defs/None/at/all"},
        "outside": {"$ref": "https://example.com/schema"},
        "any": {},
        "round": {"type": "integer"},
        "odd": {"type": "int"},
    },
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ref", "2", 2), ("ref", "two", "two"), ("chain", "1", 1), ("escaped", '{"name": "x"}', {"name": "x"}),
        ("all", '{"name": "x"}', {"name": "x"}), ("all", "5", "5"), ("narrow", "5", 5), ("narrow", "null", "null"),
        ("enum", "1", 1), ("enum", "2.5", 2.5), ("enum", "null", None), ("enum", "true", "true"), ("words", "1", "1"),
        ("words", "null", "null"), ("const", "true", True), ("const", "1", "1"), ("maybe", "null", None),
        ("maybe", '{"a": 1}', {"a": 1}), ("maybe", "[]", "[]"), ("list", "[1]", [1]), ("list", "x", "x"),
        ("loop", "1", "1"), ("tree", "1", 1), ("nowhere", "1", "1"), ("outside", "1", "1"), ("any", "1", "1"),
        ("round", "5.0", 5), ("round", "5.5", "5.5"), ("round", "1e999", "1e999"), ("odd", "5", "5"),
    ],
)  # fmt: skip
def test_an_argument_has_the_type_that_its_schema_means(name: str, text: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "read", "parameters": TYPES}}]
    (call,) = parsed("xml", xml("read", **{name: text}), tools=tools)[1]
    assert call[1][name] == value and type(call[1][name]) is type(value)


def test_references_that_multiply_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the definitions means the next one twice: as a tree they have 2^200 leaves."""
    read, whole = count(1), tool_arguments._own_kinds

    def counted(schema: Any) -> Any:
        assert next(read) < 2000
        return whole(schema)

    monkeypatch.setattr(tool_arguments, "_own_kinds", counted)
    for key in ("allOf", "anyOf"):
        pair = [{key: [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]} for n in range(200)]
        defs = {str(n): schema for n, schema in enumerate([*pair, {"type": "integer"}])}
        parameters = {"$defs": defs, "properties": {"a": {"$ref": "#/$defs/0"}, "b": {"$ref": "#/$defs/199"}}}
        tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}]
        assert parsed("xml", xml("read", b="1", a="1"), tools=tools)[1][0][1]["b"] == 1


def test_parameters_behind_a_reference_are_known() -> None:
    parameters = {"$ref": "#/$defs/Args", "$defs": {"Args": TYPES["$defs"]["Place"] | {"required": ["name"]}}}
    tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}, tool("now")]
    assert parsed("harmony", '{"name": "x"}', tools=tools)[1] == [("read", {"name": "x"})]


def test_calls_are_bounded() -> None:
    for form, text in (("hermes", '<tool_call>{"name": "'), ("llama", '{"name": "'), ("xml", "<tool_call><function=")):
        whole = text + "x" * (MAX_CALL_CHARS + 100)
        assert parsed(form, whole) == (whole, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call>" + "<function=a>" * 20_000 + "</tool_call>",
        '<tool_call>{"name": "' + "</tool_call>" * 20_000,
        "<tool_call><function=a><parameter=b></tool_call>" * 5000,
        "<function=a><parameter=b>" * 10_000,
        '<tool_call>{"a</tool_call>' * 5000,
        '<tool_call>{"a' + '</tool_call><tool_call>{":1,"b' * 5000,
        "<tool_call>{" + '"a":{' * 50_000 + "</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        xml("read", **{f"k{n}": "<parameter" for n in range(5000)}),
        " " * 200_000 + "x",
        "<" * 200_000,
        "{" * 200_000,
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_hostile_text_takes_no_time(form: CallFormat, text: str) -> None:
    parser = call_parser(form, TOOLS)
    began = time.process_time()
    parts = [part for at in range(0, len(text), 64) for part in parser.feed(text[at : at + 64])] + parser.finish()
    assert parts and time.process_time() - began < 3


@pytest.mark.parametrize(
    "parameters",
    [5, [], {"properties": 5}, {"properties": {"path": 5}}, {"properties": {"path": {"type": 5}}}, {"required": 5}]
    + [{"properties": {"path": {"anyOf": 5}}}, {"properties": {"path": {"type": {}}}}, {"required": [{}]}]
    + [{"properties": {"path": {"anyOf": [{"anyOf": [{"anyOf": [{"anyOf": [{"anyOf": [{"type": "null"}]}]}]}]}]}}}],
)
def test_odd_schemas_break_nothing(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}, {}, {"function": 5}]
    assert parsed("xml", xml("read", path="x"), tools=tools) == ("", [("read", {"path": "x"})])
    said, calls = parsed("harmony", '{"path": "x"}', tools=tools)
    assert (said == "") == bool(calls)


def test_calls_that_a_server_found_are_named_lines() -> None:
    text = 'read {"path": "a; {b"}\nnow {}\nread {"path": "c"}'
    calls = [("read", {"path": "a; {b"}), ("now", {}), ("read", {"path": "c"})]
    assert [parsed("server", text, cut) for cut in (0, 1, 7)] == [("", calls)] * 3
    for odd in (
        'read {"path": ',
        "read",
        '{"path": "x"} read',
        'read {"path": 1} and more',
        "x" * (MAX_CALL_CHARS + 9),
    ):
        assert parsed("server", odd) == parsed("server", odd, 1) == (odd, [])


def test_formats_are_seen_in_the_templates() -> None:
    assert format_of("{{ tools }} <tool_call> {...} </tool_call>") == "hermes"
    assert format_of("{{ tools }} <tool_call><function=x>") == "xml"
    assert format_of('{{ tools }} <|start_header_id|> {"name": x, "parameters": y}') == "llama"
    assert format_of("{{ tools }} <|channel|>commentary to=functions.x") == "harmony"
    assert format_of("{{ messages }} <tool_call>") is None
    assert format_of("{{ tools }}") is None and format_of("") is None and format_of(None) is None
