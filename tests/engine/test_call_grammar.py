"""Grammars of forced calls: they take what models write, and all that they allow is one call of the tool's schema."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dflash_local.api.reply_parts import PartReader, Thought
from dflash_local.chat.answer_ids import AnswerPlace, answer_ids
from dflash_local.chat.call_grammar import forced_call
from dflash_local.chat.channels import channel_parser
from dflash_local.chat.text_stream import TextStream
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_calls import CallFormat, call_parser
from dflash_local.chat.tool_formats import FORMS
from dflash_local.checkpoint_files.source import open_source
from dflash_local.engine.grammar import Grammar, Vocabulary
from dflash_local.errors import UsageError
from dflash_local.request import Request, ToolCall, user_request
from tests.chat.call_texts import NAMES, TOOLS, WRITERS
from tests.chat.conftest import CHATML_CONFIG, CHATML_SPECIAL, byte_level, write_folder

HELD: tuple[CallFormat, ...] = ("hermes", "xml", "glm", "kimi", "kimi-k3", "minimax", "llama")
SPELLED = {"llama": "tools parameters <|start_header_id|>", "harmony": "tools functions <|channel|>"}
TAGS = (
    *sorted({tag for form in FORMS.values() for pair in form.pairs for tag in pair if "<|sep|>" not in tag}),
    *("<|open|>", "<|sep|>", "<|close|>", "<|tool_call_argument_begin|>", "</parameter>"),
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "code": {"type": "string", "pattern": "^[a-c]{2}[0-9]$"},
        "words": {"type": "string", "minLength": 1, "maxLength": 3},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "deep": {"$ref": "#/$defs/flag"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
        "price": {"type": "string", "pattern": r"^[1-9]\$", "maxLength": 2},
        "file": {"type": "string", "format": "path", "maxLength": 3},
        "more": {"type": "array", "items": {"$ref": "#/properties/count"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["color", "code", "words", "count", "deep", "price", "file", "more"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
WRITTEN: tuple[dict[str, Any], ...] = (
    {},
    {"path": "a<b é\n\n", "count": -3},
    {"path": "", "content": "}", "deep": True, "extra": {"a": [1, {"b": "}"}]}},
)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """With the tags of all formats as tokens, or with none."""
    library = byte_level(CHATML_SPECIAL + (TAGS if request.param else ()), CHATML_SPECIAL)
    found = Tokenizer.load(open_source(write_folder(tmp_path_factory.mktemp("calls"), library, CHATML_CONFIG)))
    assert found is not None
    yield found
    found.close()


def held(tokenizer: Tokenizer, form: CallFormat, request: Request) -> Grammar:
    tokenizer.template = SPELLED.get(form) or " ".join(("tools", *FORMS[form].template))
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.stop_ids, torch.device("cpu"))
    matcher = vocabulary.matcher(forced_call(tokenizer, request))
    answers = answer_ids(tokenizer, False, forced=True)
    return Grammar(vocabulary, matcher, answers, AnswerPlace(True))


def allowed(grammar: Grammar, tokenizer: Tokenizer) -> list[int]:
    grammar.prepare((), 1)
    row = grammar.apply(torch.zeros(1, tokenizer.vocab_size), torch.zeros(0, dtype=torch.long))[0]
    return row.isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("form", HELD)
def test_what_a_model_writes_is_allowed_and_then_the_end(tokenizer: Tokenizer, form: CallFormat) -> None:
    request = user_request("hi", tools=tuple(TOOLS), must_call=NAMES)
    for arguments in WRITTEN:
        grammar = held(tokenizer, form, request)
        text = WRITERS[form]((NAMES[0], arguments), 0) + "\n" + WRITERS[form]((NAMES[1], {}), 1)
        grammar.accept(tokenizer.encode(tokenizer.with_controls(text)))
        assert tokenizer.stop_ids <= set(allowed(grammar, tokenizer))


@pytest.mark.parametrize("form", HELD)
def test_whatever_is_allowed_is_one_call_of_the_schema(tokenizer: Tokenizer, form: CallFormat) -> None:
    rng = random.Random(form)
    tools = (PAINT, *TOOLS)
    for _ in range(3):
        grammar, ids = held(tokenizer, form, user_request("hi", tools=tools, must_call=("paint",))), list[int]()
        while not tokenizer.stop_ids & set(now := allowed(grammar, tokenizer)):
            ids.append(rng.choice(now))
            grammar.accept(ids[-1:])
        assert set(now) <= tokenizer.stop_ids, "one tool is called once"
        parser = call_parser(form, tools)
        text = tokenizer.decode(ids, skip_special=False)
        (call,) = parser.feed(text) + parser.finish()
        assert isinstance(call, ToolCall) and call.name == "paint", repr(text)
        values = json.loads(call.arguments)
        assert set(SCHEMA["required"]) <= set(values) <= set(SCHEMA["properties"])
        assert values["color"] in ("red", "blue") and re.fullmatch("[a-c]{2}[0-9]", values["code"]), repr(text)
        assert 1 <= len(values["words"]) <= 3 and values["count"] in range(1, 100) and type(values["deep"]) is bool
        assert all(type(tag) is bool for tag in values.get("tags", [])) and len(values["file"]) <= 3
        assert re.fullmatch(r"[1-9]\$", values["price"]) and all(each in range(1, 100) for each in values["more"])


@pytest.mark.parametrize("thinks", [False, True])
def test_in_harmony_a_thought_may_stand_before_the_message_of_the_call(harmony: Tokenizer, thinks: bool) -> None:
    rng, ids = random.Random(7), list[int]()
    grammar = held(harmony, "harmony", user_request("hi", tools=(PAINT, *TOOLS), must_call=("paint", "now")))
    thought = "<|channel|>analysis<|message|>So.\n<|end|><|start|>assistant"
    for token_id in harmony.encode(harmony.with_controls(f"{thought if thinks else ''}<|channel|>com")):
        ids.append(token_id)
        grammar.accept([token_id])
    while not harmony.stop_ids & set(now := allowed(grammar, harmony)):
        ids.append(rng.choice(now))
        grammar.accept(ids[-1:])
    assert set(now) <= harmony.stop_ids, "the call ends the turn"
    stream = TextStream(harmony, (), channel_parser(harmony, opens_thinking=False))
    pieces = [*stream.push(tuple(ids), ["bonus"] * len(ids)).pieces, *stream.finish()]
    parts = PartReader("harmony", (PAINT, *TOOLS), [])
    found: list[Any] = [*parts.feed(pieces), *parts.finish()]
    assert [part.text for part in found if isinstance(part, Thought)] == ["So.\n"] * thinks
    assert isinstance(found[-1], ToolCall) and found[-1].name in ("paint", "now")


def test_a_format_of_more_than_json_and_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="cannot be forced in this model's format, gemma"):
        held(tokenizer, "gemma", user_request("hi", tools=(PAINT,), must_call=("paint",)))
