"""Ids of a GGUF file's tokenizer against those that llama.cpp gave (``tools/gguf_tokens.py`` asked it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dflash_local.chat.template import render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tokenizer_files import AddedToken, TokenizerFiles
from dflash_local.checkpoint_files.gguf_pretokenizers import PRE_TOKENIZERS
from dflash_local.checkpoint_files.gguf_tokenizer import tokenizer_of
from dflash_local.request import Message

GOLDEN: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("golden/gguf_tokens.json").read_text())
TEXTS: list[str] = GOLDEN["texts"]
NAMES = [name for name in GOLDEN if name in PRE_TOKENIZERS]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def objects(pre: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Spec and config of the golden vocabulary under this name."""
    keys: dict[str, Any] = {f"tokenizer.ggml.{name}": GOLDEN[name] for name in ("tokens", "token_type", "merges")}
    ends = {f"tokenizer.ggml.{name}_token_id": GOLDEN["tokens"].index("<|im_end|>") for name in ("bos", "eos")}
    keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.chat_template": TEMPLATE}
    found = tokenizer_of(keys | ends)
    assert found is not None
    return found


def encode(pre: str, texts: list[str]) -> list[list[int]]:
    library = tokenizers.Tokenizer.from_str(json.dumps(objects(pre)[0]))
    return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def pieces(pre: str, text: str) -> list[str]:
    """The words that a text is cut into, spelled as bytes are in a vocabulary."""
    library = tokenizers.Tokenizer.from_str(json.dumps(objects(pre)[0]))
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture(scope="module")
def smollm() -> Iterator[Tokenizer]:
    spec, config = objects("smollm")
    added = tuple(AddedToken(entry["id"], entry["content"], entry["special"]) for entry in spec["added_tokens"])
    tokenizer = Tokenizer(TokenizerFiles(spec, config, added, config["chat_template"]), frozenset())
    tokenizer.check()
    yield tokenizer
    tokenizer.close()


def test_the_golden_names_are_all_rules_of_the_table() -> None:
    missing = [name for name, rules in PRE_TOKENIZERS.items() if rules not in [PRE_TOKENIZERS[n] for n in NAMES]]
    assert missing == []


@pytest.mark.parametrize("pre", NAMES)
def test_ids_are_those_of_llama_cpp(pre: str) -> None:
    expected = GOLDEN[pre]
    known = [i for i, ids in enumerate(expected) if ids is not None]
    assert len(known) > 150
    found = encode(pre, TEXTS)
    assert [(TEXTS[i], found[i], expected[i]) for i in known if found[i] != expected[i]] == []


# What llama.cpp cannot be asked: its rules of these names leave it out.
def test_gpt_4o_cuts_words_where_the_case_changes_in_any_script() -> None:
    assert pieces("gpt-4o", "fooBar") == ["foo", "Bar"]
    assert list(map(spelled, pieces("gpt-4o", "приВЕТ e\u0301aI'm"))) == ["при", "ВЕТ", " e\u0301a", "I'm"]
    assert list(map(spelled, pieces("llama-bpe", "приВЕТ"))) == ["приВЕТ"]


def spelled(word: str) -> str:
    return str(tokenizers.decoders.ByteLevel().decode([word]))


def test_the_chat_room_reads_texts_as_the_library_does_and_back(smollm: Tokenizer) -> None:
    for text, ids in zip(TEXTS, GOLDEN["smollm"], strict=True):
        assert smollm.encode_rendering(text) == ids
        assert smollm.decode(ids, skip_special=False) == text


def test_plain_text_reaches_no_control_token(smollm: Tokenizer) -> None:
    ids = [i for text in TEXTS for i in smollm.encode(text)]
    assert len(ids) > 4000
    assert not set(ids) & smollm.added.keys()


def test_a_conversation_takes_the_template_of_the_file(smollm: Tokenizer) -> None:
    ids = render(smollm, [Message("user", "Hi 42")], thinking=False).ids
    assert smollm.decode(ids, skip_special=False) == "<|im_start|>user\nHi 42<|im_end|>\n"
    assert ids[0] == GOLDEN["tokens"].index("<|im_start|>")
    assert smollm.eos_text == "<|im_end|>"
