"""Replies held to a grammar: valid, the same drafted and plain, in both engines; where masks hold and where not."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.chat import call_grammar
from dflash_local.chat.answer_ids import answer_ids
from dflash_local.chat.template import Rendered
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_calls import call_parser
from dflash_local.checkpoint_files.source import open_source
from dflash_local.drafters.kinds import LOOKUP, folder_of
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.grammar import Grammar, Vocabulary
from dflash_local.errors import UsageError
from dflash_local.events import Step
from dflash_local.request import Constraint, Limits, Request, SamplingParams, ToolCall, user_request
from tests.chat.conftest import CHATML_CONFIG, CHATML_PLAIN, CHATML_SPECIAL, byte_level, write_folder
from tests.engine_sessions import Reply

ENGINES = ("reference", "fused")
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=1.5, top_p=0.95, presence_penalty=0.5, seed=3),
)
WORDS = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, Any] = {
    "enum": {"enum": ["red", "green", 3, None]},
    "text": {"type": "object", "properties": {"name": WORDS}, "required": ["name"]},
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 2, "maxItems": 4},
    "nested": {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}},
               "required": ["b"]}, "k": {"enum": ["x", "yy"]}}, "required": ["a", "k"]},
    "either": {"anyOf": [{"const": "no"}, {"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 3}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
}  # fmt: skip


def closed(schema: Any) -> Any:
    """With no keys besides those named: a reply of the tiny model would go on with them."""
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if schema.get("type") == "object" else {}
    return {key: closed(value) for key, value in schema.items()} | more


def meets(value: Any, schema: Any) -> bool:
    """Whether a value is one of a schema of ``SCHEMAS``."""
    if "anyOf" in schema:
        return any(meets(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind: Any = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}[schema["type"]]
    if type(value) is not kind:
        return False
    if kind is dict:
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            meets(each, known[key]) for key, each in value.items()
        )
    if kind is list:
        fits = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return fits and all(meets(each, schema["items"]) for each in value)
    if kind is str:
        return len(value) <= schema.get("maxLength", 99) and re.search(schema.get("pattern", ""), value) is not None
    return kind is bool or schema["minimum"] <= value <= schema["maximum"]


@pytest.fixture
def compact(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line breaks between the tokens of JSON: a tiny model would fill them with indentation."""
    monkeypatch.setattr(call_grammar, "SPACE", " ")


@cache
def session_of(engine: str) -> Session:
    return load(find("demo"), LoadConfig(dtype="float32", device="cpu", engine=engine))


def ask(session: Session, constraint: Constraint, prompt: str = "Count from 3 to 7.", **fields: Any) -> tuple[str, str]:
    """The text of a reply and why it ended."""
    limits = Limits(max_new_tokens=fields.pop("new", 300))
    request = user_request(prompt, constraint=constraint, limits=limits, **fields)
    reply = Reply(list(session.generate(request)))
    assert reply.finished.usage.completion_tokens == len(reply.ids)
    return "".join(piece.text for step in reply.find(Step) for piece in step.pieces), reply.finished.reason


@pytest.mark.usefixtures("compact")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_reply_is_json_of_its_schema_drafted_or_not_in_both_engines(name: str, sampling: SamplingParams) -> None:
    schema = closed(SCHEMAS[name])
    constraint = Constraint("json_schema", json.dumps(schema))
    ways: list[dict[str, Any]] = [{"mode": "ar"}, {}, {"block_size": 3}]
    replies = {
        ask(session_of(engine), constraint, sampling=sampling, **how)
        for engine, how in (*(("reference", each) for each in ways), *(("fused", each) for each in ways[:2]))
    }
    assert len(replies) == 1
    ((text, reason),) = replies
    assert reason == "stop" and meets(json.loads(text), schema), text


@pytest.mark.usefixtures("compact")
def test_what_is_learnt_of_replies_held_to_a_grammar_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of("fused")
    monkeypatch.setitem(vars(session.runner), "costs", {1: 1.0, 4: 1.2, 8: 1.4})
    session.schedulers.clear()
    ask(session, Constraint("json_schema", json.dumps(closed(SCHEMAS["numbers"]))))
    assert list(session.guided_schedulers) == [True] and not session.schedulers


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", "(yes|no) [0-9]{3}"), "(yes|no) [0-9]{3}"),
        (Constraint("lark", 'start: "ab" ("c" | "d") "é/"'), "ab[cd]é/"),
        (Constraint("lark", 'root ::= "a" [0-9] | "b"'), "a[0-9]|b"),
    ],
    ids=["regex", "lark", "gbnf"],
)
def test_other_kinds_hold_the_whole_text(constraint: Constraint, pattern: str) -> None:
    for engine in ENGINES:
        for sampling in SAMPLINGS:
            text, reason = ask(session_of(engine), constraint, sampling=sampling)
            assert re.fullmatch(pattern, text) and reason == "stop"


def test_any_object_is_one_and_json_is_not_endless_space() -> None:
    """Space between tokens is bounded, or a model could go on with it."""
    schema = closed({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    held = begun(session_of("reference"), Constraint("json_schema", json.dumps(schema)))
    tokenizer = session_of("reference").tokenizer
    spaces = {tokenizer.token_id(text) for text in ("Ġ", "Ċ", "ĊĊ")}
    assert allowed(held, said(tokenizer, "{ ")) and not allowed(held, said(tokenizer, "{ ")) & spaces
    text, reason = ask(session_of("reference"), Constraint("json_object"), new=40)
    assert text.startswith("{") and reason == "length"


def said(tokenizer: Any, text: str) -> list[int]:
    """A token for each byte of ASCII text."""
    ids = {tokenizer.token_bytes(at): at for at in range(tokenizer.vocab_size)}
    return [ids[character.encode()] for character in text]


def begun(session: Session, constraint: Constraint) -> Grammar:
    """The grammar of a reply that has not begun."""
    return session._grammar(Request(prompt_ids=(1,), constraint=constraint), Rendered((1,), 1, False))


def masked(held: Grammar, drafts: list[int], first: int = 0) -> torch.Tensor:
    """Zeros and infinities of the rows of a cycle, from one of them on."""
    held.prepare(drafts, len(drafts) + 1)
    return held.apply(torch.zeros(len(drafts) + 1 - first, 1024), torch.tensor(drafts, dtype=torch.long), first)


def allowed(held: Grammar, drafts: list[int], first: int = 0) -> set[int]:
    """What is allowed behind drafts."""
    return set(masked(held, drafts, first)[-1].isfinite().nonzero().flatten().tolist())


def test_a_row_follows_what_was_accepted_and_the_drafts_before_it() -> None:
    """Whatever slice of a block it stands in; no cycle leaves anything behind, of forbidden drafts neither."""
    session = session_of("reference")
    constraint = Constraint("regex", "ab(c|d)e")
    block, steps, letters = begun(session, constraint), begun(session, constraint), said(session.tokenizer, "abce")
    for at in range(5):
        want = allowed(steps, [])
        assert want == allowed(block, letters[:at]) == allowed(block, letters[:at], first=at)
        assert (want == set(session.stop_ids)) == (at == 4), (
            "the text may end, and with a stop id alone, where it is whole"
        )
        rows = masked(block, [letters[0], letters[0], letters[2]])
        assert rows[2:].isfinite().all(), "nothing of rows behind a forbidden draft is emitted"
        steps.accept(letters[at : at + 1])
    with pytest.raises(UsageError, match="cannot be met"):
        block.accept([min(session.stop_ids)])


@pytest.mark.parametrize("opened", [True, False])
def test_a_mask_begins_with_the_token_that_ends_the_thinking_also_inside_a_block(tmp_path: Path, opened: bool) -> None:
    library = byte_level(CHATML_SPECIAL + CHATML_PLAIN, CHATML_SPECIAL)
    tokenizer = Tokenizer.load(open_source(write_folder(tmp_path / "chatml", library, CHATML_CONFIG)))
    assert tokenizer is not None
    vocabulary = Vocabulary(tokenizer, 1024, tokenizer.stop_ids, torch.device("cpu"))
    constraint = Constraint("regex", "yes|no")
    answers = answer_ids(tokenizer, False)

    def fresh() -> Grammar:
        return Grammar(vocabulary, vocabulary.matcher(constraint), answers, answers.begin((), opened))

    start = "" if opened else "<think>"
    ids = tokenizer.encode(tokenizer.with_controls(f"{start}a</think>\n")) + said(tokenizer, "no")
    begins, newline = ids.index(tokenizer.token_id("</think>") or -1) + 1, tokenizer.encode("\n")[0]
    whole, steps = fresh(), fresh()
    rows = masked(whole, ids)
    for at in range(len(ids) + 1):
        assert torch.equal(rows[at], masked(steps, [])[0])
        count = int(rows[at].isfinite().sum())
        thinks = at < begins and (opened or at > 0)
        assert (count == 1024) == thinks and bool(rows[at, newline].isfinite()) == (thinks or at == begins)
        steps.accept(ids[at : at + 1])
    assert set(rows[-1].isfinite().nonzero().flatten().tolist()) == set(tokenizer.stop_ids)
    tokenizer.close()


def test_copied_drafts_change_no_text() -> None:
    """What the prompt holds is copied, as far as the grammar goes."""
    prompt, constraint = (
        "Say one, two, three, one, two, three, one, two, three.",
        Constraint("regex", "(one, two, (three|four), ){4}end"),
    )
    for engine in ENGINES:
        session = load(find("demo", str(folder_of(LOOKUP))), LoadConfig(dtype="float32", device="cpu", engine=engine))
        for sampling in SAMPLINGS[:2]:
            request = user_request(prompt, constraint=constraint, sampling=sampling, limits=Limits(max_new_tokens=90))
            plain, copied = (
                Reply(list(session.generate(replace(request, mode=mode))))
                for mode in ("ar", "dflash")  # type: ignore[arg-type]
            )
            assert plain.ids == copied.ids and copied.finished.reason == "stop"
            assert any(step.copied and step.accepted for step in copied.find(Step)), engine
        session.close()


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "(("), "unclosed group"),
        (Constraint("lark", "start: x"), "unknown name"),
        (Constraint("lark", 'root ::= ("a"'), "Expected"),
        (Constraint("json_schema", "{"), "Expecting property name"),
        (Constraint("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (Constraint("json_schema", '{"not": {}}'), "Unimplemented keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_held_to_is_refused_before_anything_runs(constraint: Constraint, words: str) -> None:
    with pytest.raises(UsageError, match=f"the {constraint.kind} cannot be held to.*{words}"):
        session_of("reference").generate(user_request("hi", constraint=pickle.loads(pickle.dumps(constraint))))


def test_a_model_that_cannot_write_the_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary lacks a byte; the next reply is not touched by it."""
    session = session_of("reference")
    monkeypatch.setattr(session, "_vocabulary", None)
    texts = session.tokenizer.in_reply
    monkeypatch.setattr(
        session.tokenizer,
        "in_reply",
        lambda at, first: ("", None) if b"7" in (texts(at, first)[1] or b"") else texts(at, first),
    )
    with pytest.raises(UsageError, match="no token of this model goes on"):
        ask(session, Constraint("regex", "a7"))
    assert ask(session, Constraint("regex", "a8")) == ("a8", "stop")


def test_a_constraint_needs_tokens_that_end_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of("reference")
    monkeypatch.setattr(session, "stop_ids", frozenset())
    with pytest.raises(UsageError, match="no token that ends a reply"):
        session.generate(user_request("hi", constraint=Constraint("json_object")))


def test_a_token_that_alone_is_allowed_takes_the_place_of_a_wrong_draft() -> None:
    """And those behind it are looked at as if it had been drafted, up to one that cannot come."""
    tokenizer = session_of("reference").tokenizer
    held = begun(session_of("reference"), Constraint("regex", "Xq(b|c)Zj"))
    for drafted, want in (("ZZcZj", "XqcZj"), ("Xqjjj", "Xqj"), ("XqcZj", "XqcZj"), ("jqbXX", "XqbZj")):
        assert held.forced(said(tokenizer, drafted)) == said(tokenizer, want), drafted
    ended = [*said(tokenizer, "XqbZj"), max(session_of("reference").stop_ids)]
    assert held.forced([*ended, 5]) == ended, "there is nothing behind the end"


@pytest.mark.parametrize("engine", ENGINES)
def test_no_row_is_verified_behind_a_draft_that_cannot_come(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fused engine's cycles, none of those lengths that are measured."""
    session = session_of(engine)
    if engine == "fused":
        monkeypatch.setitem(vars(session.runner), "costs", {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    request = user_request("Count.", constraint=Constraint("regex", "([0-9][a-z]){9}"), block_size=8)

    def rows() -> tuple[list[int], list[int]]:
        reply = Reply(list(session.generate(request)))
        return reply.ids, [step.rows for step in reply.find(Step)]

    ids, cut = rows()
    monkeypatch.setattr(Grammar, "forced", lambda _held, drafts: drafts)
    whole_ids, whole = rows()
    assert ids == whole_ids and set(whole[1:]) == {8} and sum(cut) < sum(whole) / 2


@pytest.mark.usefixtures("compact")
def test_a_forced_call_is_one_drafted_or_not_in_both_engines() -> None:
    """Of the form that tools are told in where a template has no place for them."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}}
    add = {"type": "function", "function": {"name": "add", "parameters": closed({**parameters, "required": ["a"]})}}
    request = user_request("Add 1 to 2.", tools=(add,), must_call=("add",), limits=Limits(max_new_tokens=200))
    texts = {
        "".join(piece.text for step in reply.find(Step) for piece in step.pieces)
        for engine, mode in (("reference", "ar"), ("reference", "dflash"), ("fused", "dflash"))
        for reply in [Reply(list(session_of(engine).generate(replace(request, mode=mode))))]  # type: ignore[arg-type]
    }
    (text,) = texts
    refused = replace(request, tools=({**add, "function": {"name": "add", "parameters": {"not": {}}}},))
    with pytest.raises(UsageError, match="the schema of a tool that must be called cannot be held to: .*Unimplemented"):
        session_of("reference").generate(refused)
    (call,) = (parser := call_parser("hermes", (add,))).feed(text) + parser.finish()
    assert isinstance(call, ToolCall) and call.name == "add" and json.loads(call.arguments)["a"] in range(100)
