"""Texts as they are scored: by themselves and as a reply, whichever is the likelier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dflash_local.catalog import bundled
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.check import likelihood
from dflash_local.check.likelihood import ALONE, REPLY, check_likelihood, nats_of, passages
from dflash_local.check.text import PROSE, ScoredText, plain_texts, toy_texts
from dflash_local.checkpoint_files.source import open_source
from dflash_local.engine import load
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig

# What gpt-oss makes of a conversation: a reply of the history is a message in the final channel.
HARMONY = (
    "{%- for m in messages %}{%- if m['role'] == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}{%- else %}"
    "{{- '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    found = Tokenizer.load(open_source(bundled.FOLDER / "demo" / "target"))
    assert found is not None
    yield found
    found.close()


def test_a_reply_is_in_the_channel_that_the_template_puts_it_in(tokenizer: Tokenizer) -> None:
    tokenizer.template = HARMONY
    for text in plain_texts():
        before, ids = passages(tokenizer, text)[REPLY]
        opening = tokenizer.decode(before, skip_special=False)
        assert text.question in opening and opening.endswith("assistant<|channel|>final<|message|>")
        assert tokenizer.decode(ids, skip_special=False) == text.text


def test_both_forms_have_the_same_tokens(tokenizer: Tokenizer) -> None:
    for text in plain_texts():
        alone, reply = passages(tokenizer, text).values()
        assert (*alone.before, *alone.ids) == reply.ids and len(reply.ids) > 200


@pytest.mark.parametrize("template", [None, "{{- messages[0]", "{{- raise_exception('no') }}", "{{- bos_token }}"])
def test_without_a_place_for_a_reply_a_text_stands_alone(template: str | None, tokenizer: Tokenizer) -> None:
    tokenizer.template = template
    assert list(passages(tokenizer, ScoredText("prose", PROSE, "Why?"))) == [ALONE]


def test_a_target_of_conversations_is_judged_by_its_replies(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys know replies alone: by themselves the same texts are far from likely."""
    monkeypatch.setattr(likelihood, "toy_texts", lambda: tuple(replace(each, alone=True) for each in toy_texts()))
    found = check_likelihood(demo, bundled.find("demo"))
    assert found.state == "ok" and all(
        max(found.figures["nats"].values()) < forms[ALONE] for forms in found.figures["forms"].values()
    )
    assert found.figures["nats"] == {kind: forms[REPLY] for kind, forms in found.figures["forms"].items()}


def test_one_form_that_is_not_a_number_is_enough(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood, "nats_of", lambda *_: {ALONE: math.nan, REPLY: 0.1})
    found = check_likelihood(demo, bundled.find("demo"))
    assert found.state == "failed" and "not finite" in found.remedy


def test_a_short_context_scores_a_beginning_or_nothing() -> None:
    session = load(bundled.find("demo"), LoadConfig(device="cpu", dtype="float32", context=64))
    (text, _) = plain_texts()
    assert session.tokenizer is not None
    forms = passages(session.tokenizer, text)
    assert set(nats_of(session, forms)) == {ALONE, REPLY}
    assert nats_of(session, {ALONE: forms[ALONE]._replace(before=forms[ALONE].ids[:60])}) == {}
    session.close()
