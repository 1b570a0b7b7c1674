"""Tokenizers, templates and generation settings that mean harm or are merely wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.models.hostile_fields import HUGE, Case, edited, short

REGEX_BOMB = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
GROWTH = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


def nested(depth: int) -> dict[str, Any]:
    """A decoder that is a sequence of one sequence of one, and so on."""
    found: dict[str, Any] = {"type": "Fuse"}
    for _ in range(depth // 2):  # two levels of JSON each
        found = {"type": "Sequence", "decoders": [found]}
    return found


SPEC: dict[str, tuple[Any, ...]] = {
    "model": (None, 5, {}, {"type": "Evil"}, {"type": "BPE"}, {"type": "BPE", "vocab": {"a": HUGE}, "merges": []}),
    "normalizer": ({"type": "Evil"}, 5, {"type": "Sequence", "normalizers": [GROWTH] * 4}, {"type": "Precompiled"}),
    "pre_tokenizer": (REGEX_BOMB, {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}, 5),
    "post_processor": ({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}, 5),
    "decoder": ({"type": "Evil"}, 5, [5], {"type": []}, {"type": "Sequence", "decoders": 5}, nested(900)),
    "added_tokens": (
        *(5, [5], [{}], [{"id": HUGE, "content": "x"}], [{"id": -1, "content": "x"}], [{"id": 5, "content": 5}]),
        *([{"id": 2**31 - 1, "content": "x"}], [{"id": 5000, "content": "x" * 2**20}], [{"id": "1", "content": "x"}]),
    ),
    "version": (5, None),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "added_tokens_decoder": (5, {"x": {}}, {"9" * 5000: {"content": "x"}}, {"1": 5}, {"5000": {"content": "x"}}),
    "chat_template": (5, [], [{"name": []}], [{"name": "default", "template": 5}], "{{", "x" * 2_000_000),
    "eos_token": (5, [], {}, "no such token"),
    "tokenizer_class": ("evil.Evil", 5),
    "auto_map": ({"AutoTokenizer": ["evil.Evil", None]},),
    "extra_special_tokens": (5, {"a": []}, [5]),
    "model_max_length": (HUGE, "x"),
}
GENERATION: dict[str, tuple[Any, ...]] = {
    "eos_token_id": ("x", -1, HUGE, [[1]], {}),
    "custom_generate": ("evil/evil", "generate.py"),
    "temperature": ("x", -1, HUGE, float("nan")),
    "top_k": ("x", -1, HUGE, 1.5),
    "top_p": ("x", 5, HUGE, float("inf")),
    "do_sample": ("yes", 1),
}
TEMPLATES = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a leak": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "memory": "{{ 'a' * 10**10 }}",
    "broken": "{% if %}",
    "an include": "{% include '/etc/passwd' %}",
}


def value_of(file: str, key: str, value: Any) -> Callable[[Path], None]:
    def change(found: dict[str, Any]) -> None:
        found[key] = value
        if file == "generation_config.json":
            found.setdefault("do_sample", True)

    def apply(pair: Path) -> None:
        if key == "chat_template":
            (pair / "target" / "chat_template.jinja").unlink()
        edited("target", file, change)(pair)

    return apply


def written(name: str, text: str) -> Callable[[Path], None]:
    def change(pair: Path) -> None:
        (pair / "target" / name).write_text(text, encoding="utf-8")

    return change


def tokenizer_cases() -> Iterator[Case]:
    """Of the target; a drafter has no tokenizer."""
    files = {"tokenizer.json": SPEC, "tokenizer_config.json": SETTINGS, "generation_config.json": GENERATION}
    for file, table in files.items():
        for key, values in table.items():
            for value in values:
                yield Case("tokenizer", f"{file} {key} = {short(value)}", value_of(file, key, value))
    for file in files:
        for text in ("", "{", "[]", "null", "[" * 100_000):
            yield Case("tokenizer", f"{file} holds {short(text)}", written(file, text))
    for name, text in TEMPLATES.items():
        yield Case("tokenizer", f"a template with {name}", written("chat_template.jinja", text))
    for name in ("added_tokens.json", "special_tokens_map.json", "chat_template.json"):
        for text in ("[1]", '{"x": []}', '{"x": 1e999}'):
            yield Case("tokenizer", f"{name} holds {text}", written(name, text))
