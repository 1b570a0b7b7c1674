"""The toy's tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tools.train.corpus import BUCKETS, build_corpus
from tools.train.data import Conversation, conversations
from tools.train.demo import SEED
from tools.train.shapes import MASK_ID, VOCAB_SIZE
from tools.train.vocabulary import TEMPLATE, encode, render, save_vocabulary, train_vocabulary

DEMO = Path(__file__).parents[2] / "dflash_local" / "demo"


def _messages(one: Conversation) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": one.system}] if one.system else []
    for turn in one.turns:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.answer}]
    return messages


def test_training_text_is_what_the_template_renders() -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    for one in conversations(1, 30):
        rendered = template.render(messages=_messages(one), add_generation_prompt=False, enable_thinking=False)
        assert "".join(text for text, _ in render(one)) == rendered


def test_training_ids_are_those_of_the_whole_rendering(tokenizer: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(DEMO / "demo" / "target")
    several = list(conversations(2, 40))
    for one, (ids, own) in zip(several, encode(tokenizer, several), strict=True):
        assert loaded.apply_chat_template(_messages(one), enable_thinking=True)["input_ids"] == ids
        written = tokenizer.decode([i for i, mine in zip(ids, own, strict=True) if mine], skip_special_tokens=False)
        assert written == "".join(turn.answer + "<|im_end|>" for turn in one.turns)


@pytest.mark.slow  # half a minute, and nothing of it changes but by the recipe
def test_shipped_vocabulary_is_reproduced_by_the_recipe(tokenizer: Tokenizer) -> None:
    again = json.loads(train_vocabulary(conversations(SEED, 20_000)).to_str())["model"]
    for pair in ("demo", "demo-hybrid"):
        saved = json.loads((DEMO / pair / "target" / "tokenizer.json").read_text(encoding="utf-8"))
        assert saved["model"] == again


def test_mask_row_is_no_token_and_bytes_survive(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == MASK_ID == VOCAB_SIZE - 1
    assert tokenizer.id_to_token(MASK_ID) is None
    text = "Größe 42 <|mask|> 日本 \U0001f600\t\r\n x"
    ids = tokenizer.encode(text).ids
    assert MASK_ID not in ids and tokenizer.decode(ids) == text


def test_every_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    assert [t for t in tokenizer.encode("1234 and 56").tokens if t.isdigit()] == list("123456")


def test_saved_vocabulary_has_template_and_stop(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_vocabulary(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>" and config["chat_template"] == TEMPLATE
    assert (tmp_path / "chat_template.jinja").read_text() == TEMPLATE


def test_corpus_pads_right_and_drops_what_is_too_long(tokenizer: Tokenizer) -> None:
    corpus = build_corpus(tokenizer, 3, 60, torch.device("cpu"))
    assert set(corpus.rows) <= set(BUCKETS)
    for length, batch in corpus.rows.items():
        assert batch.ids.shape == batch.own.shape == (len(batch.ids), length)
        assert not (batch.own & ~batch.real).any() and not batch.ids[~batch.real].any()
        assert (batch.real.long().diff(dim=1) <= 0).all()
    one, other = next(corpus.batches(5, 512)), next(corpus.batches(5, 512))
    assert torch.equal(one.ids, other.ids) and one.ids.numel() <= 640
