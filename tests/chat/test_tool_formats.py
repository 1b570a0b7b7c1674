"""What each format makes of texts that parsers elsewhere get wrong (vLLM's and SGLang's issues and tests)."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.chat import tool_calls
from dflash_local.chat.tool_calls import CallFormat, call_parser, format_of
from dflash_local.chat.tool_formats import FORMS, Form, JsonBody
from dflash_local.request import ToolCall
from tests.chat.call_texts import TOOLS, WRITERS, events

WRITE = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n{}\n</parameter>\n"
WRITE += "</function>\n</tool_call>"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
NOW: tuple[str, dict[str, Any]] = ("now", {})
CUT = "<tool_call>\n<function=write>\n<parameter=path>\n"


def read(form: CallFormat, text: str) -> tuple[list[Any], int]:
    """All events, and how many calls were broken; the same for one piece and for single characters."""
    results = []
    for pieces in ([text], list(text)):
        parser = call_parser(form, TOOLS)
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        results.append((events(parts), parser.broken))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    "value",
    [
        "</parameter>\n</tool_call>",
        "A block ends with </parameter> here. </function> </tool_call> <tool_call>",
        'def f():\n    return "</parameter>"\n',
        'PARAMETER, END = "<parameter=", "</parameter>"',
        "Write <parameter=path> first",
        WRITE.format("x"),
        "&lt;a&gt; &amp; <!-- -->",
        "\n  kept  \n",
        "</tool_call>" * 100,
    ],
)
def test_a_value_may_hold_the_tags_of_its_format(value: str) -> None:
    assert read("xml", WRITE.format(value)) == ([("write", {"path": "a", "content": value})], 0)


CALLS: list[tuple[CallFormat, str, list[Any]]] = [
    ("xml", WRITE.format("1") + WRITE.format("2"), [("write", {"path": "a", "content": n}) for n in "12"]),
    ("xml", f"{CUT}a\n<parameter=content>\nb\n</parameter></function></tool_call>",
     [("write", {"path": "a", "content": "b"})]),
    ("xml", f"{CUT}a\n</function>\n</tool_call>", [("write", {"path": "a"})]),
    ("xml", '<tool_call><function=write><parameter=tags>\n["a", true]\n</parameter></function></tool_call>',
     [("write", {"tags": ["a", True]})]),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a\nb\tc"}}</tool_call>',
     [("write", {"path": "a\nb\tc"})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}</tool_call>', [NOW, NOW]),
    ("kimi", f"Hi {SECTION}{KIMI.format(0)}{KIMI.format(1)}{END_SECTION} ", ["Hi", NOW, NOW]),
    ("kimi", KIMI.format(0), [NOW]),
    ("kimi", SECTION + KIMI.format(0), [NOW]),
    ("kimi", f"{SECTION}\n<|tool_call_begin|>\nfunctions.now:0\n<|tool_call_argument_begin|>\n{{}}\n{END_SECTION}",
     [NOW]),
    ("glm", "<tool_call>now</tool_call>", [NOW]),
    ("glm", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value></arg_value>\n</tool_call>",
     [("write", {"path": ""})]),
    ("minimax", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="content"><parameter>\n</parameter>\n'
     '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
     [("write", {"content": "<parameter>\n</parameter>\n"}), NOW]),
    ("gemma", '<|tool_call>call:write{extra:{m:<|"|>a } "b"<|"|>,n:[1]},path:<|"|>C:\\x<|"|>}<tool_call|>',
     [("write", {"extra": {"m": 'a } "b"', "n": [1]}, "path": "C:\\x"})]),
    ("gemma", '<|tool_call>call:write{tags:["a"]}<tool_call|>', [("write", {"tags": ["a"]})]),
    ("harmony", 'I look.to=functions.now {"a": 1}', ["I look.", ("now", {"a": 1})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CALLS)
def test_calls_are_whole(form: CallFormat, text: str, expected: list[Any]) -> None:
    assert read(form, text) == (expected, 0)


BROKEN: list[tuple[CallFormat, str, list[Any]]] = [
    ("xml", f"{CUT}/usr/New", []),
    ("xml", f"{CUT}a\n</parameter>\n", []),
    ("xml", '<tool_call>\n<function=runshell command="ls">\n</function>\n</tool_call>', []),
    ("xml", "<tool_call>\n<<function=now>\n</function>", []),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "a "b" c"}}</tool_call>',
     ['<tool_call>{"name": "now", "arguments": {}}</tool_call>']),
    ("hermes", '<tool_call>{"name": "wri\n', ['<tool_call>{"name": "now", "arguments": {}}</tool_call>']),
    ("kimi", f"{SECTION}<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{{", []),
    ("glm", "<tool_call>write<arg_key>path</arg_key><arg_value>a", []),
    ("gemma", '<|tool_call>call:write{path:weather in Tokyo<|"|>}<tool_call|>', []),
    ("harmony", 'to=functions.now {"a": ', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "behind"), BROKEN)
def test_a_broken_call_is_text_and_the_next_one_counts(form: CallFormat, text: str, behind: list[str]) -> None:
    expected = [text, NOW] if behind else [text]
    assert read(form, text + "".join(behind)) == (expected, 1)


def test_kimi_gives_a_call_its_id() -> None:
    (call,) = call_parser("kimi", TOOLS).feed(SECTION + KIMI.format(7) + END_SECTION)
    assert isinstance(call, ToolCall) and call.id == "functions.now:7"


@pytest.mark.parametrize("form", WRITERS)
def test_a_long_file_is_written(form: CallFormat) -> None:
    call = ("write", {"path": "a", "content": "x = '</parameter> </tool_call>' # é\n" * 10_000})
    text = WRITERS[form](call, 0)
    assert len(text) > 300_000
    parser = call_parser(form, TOOLS)
    parts = [part for at in range(0, len(text), 4) for part in parser.feed(text[at : at + 4])] + parser.finish()
    assert events(parts) == [call]


def test_a_limit_holds_for_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "MAX_CALL_CHARS", 60)
    text = WRITERS["hermes"](("write", {"path": "x" * 60}), 0) + WRITERS["hermes"](NOW, 1)
    parsed, broken = read("hermes", text)
    assert broken == 1 and parsed[-1] == NOW and len(parsed) == 2


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>", "kimi"),
        ("{% if tools %}<|open|>tools<|sep|><|open|>argument key=", "kimi-k3"),
        ("{% if tools %}{% set begin = '<minimax:tool_call>' %}<tool_call>", "minimax"),
        ("{% if tools %}<|tool_call>call:{{ name }}", "gemma"),
        ("{% if tools %}<tool_call>{name}<arg_key>", "glm"),
    ],
)
def test_formats_are_seen_in_templates(template: str, form: CallFormat) -> None:
    assert format_of(template) == form


def test_a_new_format_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "mine", Form((("[CALL]", "[END]"),), (JsonBody,), ("[CALL]",)))
    assert read("mine", 'a [CALL]{"name": "now", "arguments": {}}[END] b') == (["a", NOW, "b"], 0)  # type: ignore[arg-type]
