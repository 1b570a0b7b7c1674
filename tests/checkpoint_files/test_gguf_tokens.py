"""Ids of a GGUF file's tokenizer against those that llama.cpp gave (``tools/gguf_tokens.py`` asked it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tokenizer_files import AddedToken, TokenizerFiles
from dflash_local.checkpoint_files.gguf_pretokenizers import PRE_TOKENIZERS
from dflash_local.checkpoint_files.gguf_tokenizer import tokenizer_of

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


def test_the_chat_room_reads_texts_as_the_library_does_and_back(smollm: Tokenizer) -> None:
    for text, ids in zip(TEXTS, GOLDEN["smollm"], strict=True):
        assert smollm.encode(smollm.with_controls(text)) == ids
        assert smollm.decode(ids, skip_special=False) == text


def test_plain_text_reaches_no_control_token(smollm: Tokenizer) -> None:
    ids = [i for text in TEXTS for i in smollm.encode(text)]
    assert len(ids) > 4000
    assert not set(ids) & smollm.added.keys()
